"""Several planners on the same episode, side by side, as one GIF.

    python -m benchmarks.side_by_side RUN OUT.gif --planner rcbc@0.4 --planner q@1 --seed 7

All start from the same state with the same weights. An episode that ended stays on its last frame,
with its return; captions grow with the steps taken.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from m3pc.evaluation.video import record_video
from m3pc.model import checkpoint
from planner.policy import Policy

EVERY = 8  # steps between two frames
SIDE = 240  # pixels of one picture
CAPTION = 34  # pixels above it
LABELS = {"rcbc": "cloned", "m": "planned (m)", "q": "planned (q)", "q0": "planned (q0)"}

Picture = NDArray[np.uint8]


def film(run: Path, planner: str, seed: int) -> tuple[list[Picture], NDArray[np.float32]]:
    """Frames and rewards of one episode, played as `m3pc evaluate` plays it."""
    mode, _, ratio = planner.partition("@")
    weights = checkpoint.read(run).weights
    config = weights.config
    conditioning = config.conditioning.model_copy(update={"evaluation_ratio": float(ratio or 1)})
    planning = config.planner.model_copy(update={"mode": mode})
    config = config.model_copy(update={"planner": planning, "conditioning": conditioning})
    frames: list[Picture] = []
    assert weights.env is not None
    with tempfile.TemporaryDirectory() as folder:
        rollout = record_video(
            weights.env,
            Policy(weights, config),
            Path(folder) / "episode.mp4",
            seed=seed,
            every=EVERY,
            size=(SIDE, SIDE),
            on_frame=lambda _, frame: frames.append(frame),
        )
    return frames, rollout.episode.rewards


def compose(films: dict[str, tuple[list[Picture], NDArray[np.float32]]]) -> list[Image.Image]:
    length = max(len(frames) for frames, _ in films.values())
    pictures = []
    for number in range(length):
        sheet = Image.new("RGB", (SIDE * len(films), SIDE + CAPTION), "white")
        draw = ImageDraw.Draw(sheet)
        for column, (planner, (frames, rewards)) in enumerate(films.items()):
            frame = frames[min(number, len(frames) - 1)]
            sheet.paste(Image.fromarray(frame), (column * SIDE, CAPTION))
            steps = min(number * EVERY + 1, len(rewards))
            label = LABELS[planner.partition("@")[0]]
            ended = "  ended" if number * EVERY >= len(rewards) else ""
            total = rewards[:steps].sum(dtype=np.float64)
            draw.text((column * SIDE + 8, 4), label, fill="black", font_size=14)
            text = f"step {steps}   return {total:.0f}{ended}"
            draw.text((column * SIDE + 8, 19), text, fill="dimgray", font_size=12)
        pictures.append(sheet.quantize(colors=64, dither=Image.Dither.NONE))
    return pictures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--planner", action="append", required=True, help="MODE@RATIO")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    films = {name: film(given.run, name, given.seed) for name in given.planner}
    pictures = compose(films)
    pictures[0].save(
        given.out, save_all=True, append_images=pictures[1:], duration=50, loop=0, optimize=True
    )
    for name, (_, rewards) in films.items():
        print(f"{name}: {len(rewards)} steps, return {rewards.sum(dtype=np.float64):.0f}")
    print(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
