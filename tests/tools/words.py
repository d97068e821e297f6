"""Retired words: the field has a better one for each. `python -m tests.tools.words [PATH...]`.

Prints FILE:LINE: WORD for every hit in an identifier, comment, string or document; exit code 1 if
there is any.
"""

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

# The retired word, and what says the same in the field's terms.
RETIRED = {
    "seat": "supervised process",
    "house": "service spec",
    "examiner": "evaluation scheduler",
    "told": "reported, sent, published",
    "company": "other requests in the batch",
    "mate": "follower, peer",
    "meeting": "rendezvous",
    "babble": "random hold",
    "babbler": "random-hold policy",
    "babbled": "random-hold",
    "babbling": "random actions",
    "farewell": "pending end",
    "keeper": "coordinator",
    "whoever": "the process, caller or user that ...",
    "whomever": "the process, caller or user that ...",
    "rubbish": "invalid data",
    "strangers": "unknown, foreign",
}
RETIRED_NAMES = {"found": "the noun", "most": "max_...", "least": "min_...", "whole": "complete"}
PHRASES = {"for ever": "permanently, indefinitely"}

# What users type or files contain keeps its name.
ALLOWED = re.compile(
    r"told by the sizes of object and states"
    r"|\"babbling\"|--quality babble|\"babble\"|`babble`|babble or|or babble|quality=babble"
    r"|test_words|least_actors|most_actors|tools/words"
)
FORMER_NAMES = {"m3pc/robot_client.py": {"told"}}  # attributes that robots' programs may use
SUFFIXES = {".md", ".yml", ".yaml", ".toml", ".json", ".html", ".cff"}
SKIPPED = ("CHANGELOG.md", "tests/tools/words.py", "constraints.txt", "kuberay_schema.json")


def parts(name: str) -> list[str]:
    """The words of an identifier: snake_case and CamelCase."""
    return re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name).lower().strip("_").split("_")


def singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and word[:-1] in RETIRED else word


def in_prose(text: str) -> Iterator[str]:
    text = ALLOWED.sub("", text)
    for word in re.findall(r"[A-Za-z]+", text):
        if singular(word.lower()) in RETIRED:
            yield word
    for phrase in PHRASES:
        if re.search(rf"\b{phrase}\b", text.lower()):
            yield phrase


def in_python(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        line = token.start[0]
        if token.type == tokenize.NAME:
            if ALLOWED.fullmatch(token.string):
                continue
            words = [singular(word) for word in parts(token.string)]
            yield from ((line, token.string) for word in words if word in RETIRED)
            if token.string in RETIRED_NAMES:
                yield line, token.string
        elif token.type in (tokenize.COMMENT, tokenize.STRING):
            for offset, text in enumerate(token.string.splitlines()):
                yield from ((line + offset, word) for word in in_prose(text))


def check(paths: Iterable[Path]) -> Iterator[str]:
    for path in paths:
        if str(path).endswith(SKIPPED) or not path.is_file():
            continue
        if path.suffix == ".py":
            hits: Iterable[tuple[int, str]] = in_python(path.read_text(encoding="utf-8"))
        elif path.suffix in SUFFIXES or path.name == "Makefile":
            lines = path.read_text(encoding="utf-8").splitlines()
            hits = ((n, word) for n, text in enumerate(lines, 1) for word in in_prose(text))
        else:
            continue
        for line, word in hits:
            if word in FORMER_NAMES.get(str(path), ()):
                continue
            key = word.lower() if word.lower() in PHRASES else singular(word.lower())
            better = (RETIRED | RETIRED_NAMES | PHRASES).get(key)
            better = better or next(
                RETIRED[singular(p)] for p in parts(word) if singular(p) in RETIRED
            )
            yield f"{path}:{line}: {word}: say {better}"


def main(arguments: list[str]) -> int:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *arguments]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    hits = list(check(Path(name) for name in listed.splitlines()))
    sys.stdout.writelines(f"{hit}\n" for hit in hits)
    return int(bool(hits))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
