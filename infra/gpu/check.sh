#!/bin/sh
# The device tests (CUDA graphs among them) and the transfer benchmark on a machine with a GPU: `infra/gpu/check.sh [OUT.json]`, in the repository.
# Among them what the card's libraries keep beside tensors (`-k kernels`), which no card has shown yet.
# Needs python3 (or $PYTHON) with torch, numpy, pydantic, ml_dtypes, xxhash and pytest; the engines' tests also diffusers,
# transformers and pytest-asyncio, and are skipped without. No Ray, no network. In host memory: GIGABYTES (30, or less for a
# smaller card) of tensors and as much again. DEVICE=sim tries it without a card: bytes are true then, seconds are those of
# host copies. Leaves OUT.json, and beside it the tests' output in OUT.json.log; ends with 0 when all went well.
set -u
cd "$(dirname "$0")/../.." || exit 1
out=${1:-out/gpu.json}
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
mkdir -p "$(dirname "$out")"
for module in torch numpy pydantic ml_dtypes xxhash pytest; do
  "$python" -c "import $module" 2>/dev/null || { echo "$python has no $module" >&2; exit 1; }
done
export PYTHONPATH="$PWD"
# Without the plugins of the pinned environment, their settings are unknown; that is no error here.
"$python" -m pytest tests/device --device "$device" -q -o addopts="-ra --import-mode=importlib" >"$out.log" 2>&1
tests=$?
tail -n 15 "$out.log"
"$python" infra/gpu/measure_transfers.py --device "$device" --gigabytes "${GIGABYTES:-30}" --tests "$tests" --out "$out"
measured=$?
[ "$tests" -eq 0 ] && [ "$measured" -eq 0 ]
