#!/bin/sh
# SPDX-License-Identifier: MIT
# Data and context parallel training on one or several machines with torchrun. Run it on every machine:
#   NODES=2 FIRST=node0 sh examples/torchrun.sh --task bytes --data corpus --length 64k ...
# All machines must see the folder OUT and the data. Without variables: the GPUs of this machine, or two
# processes on its CPU.
set -eu
OUT=${OUT:-runs/distributed}
CONTEXT=${CONTEXT:-1}  # ranks that share each sequence; must divide the heads of every group
FOUND=$(nvidia-smi --list-gpus 2>/dev/null | wc -l)
if [ "$FOUND" -gt 0 ]; then
  DEVICE=${DEVICE:-cuda} RANKS=${RANKS:-$FOUND}
else
  DEVICE=${DEVICE:-cpu} RANKS=${RANKS:-2}
fi
# When a rank fails all start again from the last checkpoint, three times at most.
exec torchrun --nnodes "${NODES:-1}" --nproc-per-node "$RANKS" --max-restarts 3 --rdzv-backend c10d \
  --rdzv-endpoint "${FIRST:-localhost}:${PORT:-29500}" --rdzv-id coterie ${TORCHRUN_OPTIONS:-} \
  --no-python coterie train --device "$DEVICE" --out "$OUT" --train.context "$CONTEXT" --checkpoint.every 200 "$@"
