"""The authors' names of a network's parameters, and ours: a second hand beside the importer's."""

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor

from benchmarks.reference import MODALITIES

RENAMES = {  # the authors' names, which for layers are torch's own, and ours
    "encoder_embed_dict.": "embed.",
    "decoder_embed_dict.": "decoder_embed.",
    ".layers.": ".",
    ".self_attn.in_proj_": ".qkv.",
    ".self_attn.out_proj.": ".out.",
    ".linear1.": ".expand.",
    ".linear2.": ".contract.",
    "encoder.norm.": "encoder_norm.",
    "decoder.norm.": "decoder_norm.",
    "output_head_dict.": "heads.",
    "actions.log_std.": "actions.log_sigma.",
}
STACKED = {  # one row per modality
    "encoder_modalities": "encoder_per_dim_encoding",
    "decoder_modalities": "decoder_per_dim_encoding",
    "mask_tokens": "mask_token_dict",
}


def renamed(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    def ours(name: str) -> str:
        return reduce(lambda text, pair: text.replace(*pair), RENAMES.items(), name)

    return {ours(name): tensor for name, tensor in theirs.items()}


def stacked(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    def rows(name: str) -> Tensor:
        return torch.stack([theirs[f"{name}.{modality}"].flatten() for modality in MODALITIES])

    return {ours: rows(name) for ours, name in STACKED.items()}
