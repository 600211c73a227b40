#!/usr/bin/env bash
# Makes .venv-bench beside this folder's parent: the interpreter in which the peers (TorchRec, FuxiCTR) and our own
# contestant run, so that both sides have the same torch. Complete on its own; nothing is done when it is up to date.
# `setup.sh rectools` makes .venv-rectools instead, with the same torch and the older numpy and pandas that RecTools needs;
# `setup.sh newest` makes .venv-bench-newest: TorchRec and FBGEMM as new as they load, with the torch that FBGEMM belongs to.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
if [[ ${1:-} == rectools ]]; then
  stamp=.venv-rectools/.ready
  [[ -e $stamp && $stamp -nt benchmarks/next_item/requirements.txt ]] && exit 0
  echo "setting up .venv-rectools (about 2 minutes)"
  [[ -x .venv-rectools/bin/python ]] || "$python" -m venv .venv-rectools
  .venv-rectools/bin/pip install -qq --disable-pip-version-check --no-deps -r benchmarks/next_item/requirements.txt
  .venv-rectools/bin/python -W ignore -c 'import torch, rectools.models; print(f"torch {torch.__version__}")'
  touch "$stamp"
  exit 0
fi
if [[ ${1:-} == newest ]]; then
  venv=.venv-bench-newest
  stamp="$venv/.ready"
  [[ -e $stamp && $stamp -nt benchmarks/newest_torchrec.txt && $stamp -nt requirements/cpu.txt ]] && exit 0
  echo "setting up $venv: the newest TorchRec (about 3 minutes; a build of torch with CUDA takes 4 GB)"
  [[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
  # torch with what its build asks for, then exact versions; FBGEMM and TorchRec alone: requirements/bench.txt says why.
  "$venv/bin/pip" install -qq --disable-pip-version-check "$(grep '^torch==' benchmarks/newest_torchrec.txt)"
  grep -hvE '^(torch|fbgemm-gpu-cpu)==' requirements/cpu.txt > "$venv/others.txt"
  "$venv/bin/pip" install -qq --disable-pip-version-check --no-deps -r "$venv/others.txt" -r benchmarks/newest_torchrec.txt
  "$venv/bin/python" -W ignore - <<'CHECK'
import fbgemm_gpu, torch, torchrec
print(f"torch {torch.__version__}, fbgemm-gpu {fbgemm_gpu.__version__}, torchrec {torchrec.__version__}")
CHECK
  touch "$stamp"
  exit 0
fi
venv=.venv-bench
stamp="$venv/.ready"

if [[ -e $stamp && $stamp -nt requirements/cpu.txt && $stamp -nt requirements/bench.txt &&
  $stamp -nt requirements/retrieval.txt ]]; then
  exit 0
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  printf 'expected: Python >= 3.11\nfound:    %s\nwhere:    benchmarks/setup.sh\nways out:\n  1. PYTHON=python3.11 make bench\n' \
    "$("$python" --version 2>&1)" >&2
  exit 1
}
echo "setting up $venv: TorchRec, FuxiCTR and what they need (about 2 minutes)"
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
"$venv/bin/pip" install -qq --disable-pip-version-check --no-deps -r requirements/cpu.txt -r requirements/bench.txt \
  -r requirements/retrieval.txt
"$venv/bin/python" -W ignore - <<'CHECK'
import fbgemm_gpu, torch, torchrec
assert torch.__version__ == "2.13.0+cpu", f"expected torch 2.13.0+cpu, found {torch.__version__}: a requirement replaced it"
import fuxictr.pytorch.models
print(f"torch {torch.__version__}, fbgemm-gpu {fbgemm_gpu.__version__}, torchrec {torchrec.__version__}, fuxictr {fuxictr.__version__}")
CHECK
touch "$stamp"
