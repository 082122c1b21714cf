# SPDX-License-Identifier: MIT
"""``python -m coterie.info`` prints versions, CPU, CUDA devices and how to write specs."""

from __future__ import annotations

import platform

import torch

from .library import build_facts, spec_help


def _rows() -> dict[str, str]:
    facts = build_facts()
    cuda = facts["cuda_toolkit"]
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "coterie": facts["version"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "built with": f"{facts['compiler']}, {facts['build_type']}",
        "CPU": f"{facts['cpu']}, {facts['instruction_set']}, {facts['threads']} threads",
        "CUDA kernels": "not built" if cuda == "none" else f"toolkit {cuda}",
        "CUDA devices": ", ".join(devices) or "none",
    }


def main() -> None:
    """Prints the table."""
    rows = _rows()
    for name, text in rows.items():
        print(f"{name:14}{text}")
    print(f"\n{spec_help()}")


if __name__ == "__main__":
    main()
