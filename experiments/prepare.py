#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Unpacks wiki100m for experiments: experiments/prepare.py FOLDER_WITH_PACKS runs/data/wiki100m

The packs are wiki100m.train.txt.xz and wiki100m.valid.txt.xz. There is no test file: the validation
file is cut between documents, its first half is for tuning and its second half for reporting.
"""

from __future__ import annotations

import hashlib
import lzma
import sys
from pathlib import Path

CUT = 2_510_693  # bytes of the validation file before the part for reporting
PACKS = {
    "train": "d3f297a79b8ecd9c97c2487bc2ca263c5416e910c416a31c30574bbce67e28f5",
    "valid": "3661c713b485dbbbf409d64d11617b48cf7c22244c10a12dc82364a90d740956",
}


def unpacked(folder: Path, part: str) -> bytes:
    """The text of a pack whose checksum is the known one."""
    pack = (folder / f"wiki100m.{part}.txt.xz").read_bytes()
    checksum = hashlib.sha256(pack).hexdigest()
    if checksum != PACKS[part]:
        sys.exit(f"prepare.py: expected {PACKS[part]} as the checksum of {part}; got {checksum}")
    return lzma.decompress(pack)


def main() -> None:
    """Writes the three parts."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: {__doc__.splitlines()[0]}")
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    held_out = unpacked(source, "valid")
    parts = {"train": unpacked(source, "train"), "valid": held_out[:CUT], "test": held_out[CUT:]}
    for name, text in parts.items():
        (target / f"wiki100m.{name}.txt").write_bytes(text)


if __name__ == "__main__":
    main()
