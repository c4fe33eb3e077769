#!/bin/bash
# Trains on machines that mpirun (Open MPI) reaches, one process on each, and starts again after a failure:
#
#   experiments/launch/mpirun.sh -n 16 --hostfile hosts -- --config=experiments/configs/llama3_70b.py --workdir=/shared/runs/mine
#
# from the folder of Convoy, which all machines have at the same place. What stands before -- goes to mpirun, the rest to
# `train`. The first machine of the host file is the one on which this is called; otherwise add
# -x JAX_COORDINATOR_ADDRESS=HOST:PORT, a free port on the machine of rank 0. CONVOY_PYTHON names the interpreter (default:
# .venv/bin/python). SIGTERM, SIGINT or SIGUSR1 to this script: all processes save the same step, and it ends with 75.
python="${CONVOY_PYTHON:-.venv/bin/python}"
of_mpirun=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do of_mpirun+=("$1"); shift; done
if [ $# = 0 ]; then echo "usage: $0 [flags of mpirun] -- --config=FILE --workdir=FOLDER [flags of train]" >&2; exit 2; fi
shift

stopped=
child=
# To its own SIGTERM mpirun answers by killing; SIGUSR1 it hands on to all processes.
trap 'stopped=1; interrupted=1; [ -n "$child" ] && kill -USR1 "$child"' TERM INT USR1

run() {
  mpirun --map-by node --bind-to none "${of_mpirun[@]}" "$python" main.py "$@" &
  child=$!
  interrupted=1
  while [ -n "$interrupted" ]; do # a signal ends `wait`, too
    interrupted=
    wait "$child"
    code=$?
  done
  child=
  return "$code"
}

run preflight "$@" || exit
newest() { # step of the newest checkpoint
  local flag last= folder=
  for flag; do
    case $flag in --workdir=*) folder=${flag#*=} ;; *) [ "$last" = --workdir ] && folder=$flag ;; esac
    last=$flag
  done
  ls "$folder/checkpoints" 2>/dev/null | grep -x '[0-9]*' | sort -n | tail -n 1
}

times=0 # failures in a row without a new checkpoint
while true; do
  before=$(newest "$@")
  run train "$@"
  code=$?
  case $code in 0 | 2 | 3 | 4 | 75) exit "$code" ;; esac
  [ -n "$stopped" ] && exit "$code"
  [ "$(newest "$@")" = "$before" ] && times=$((times + 1)) || times=1
  if [ "$times" -gt "${CONVOY_RESTARTS:-3}" ]; then
    echo "ended with $code, $times times in a row without a new checkpoint: giving up" >&2
    exit "$code"
  fi
  echo "ended with $code, as when a machine fails: going on from the newest checkpoint" >&2
  sleep 5
done
