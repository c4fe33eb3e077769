#!/bin/bash
# Trains on a Slurm cluster, one process on each node, and goes on by itself after the time limit and after failed machines:
#
#   sbatch --nodes=16 --gpus-per-node=8 experiments/launch/slurm.sh --config=experiments/configs/llama3_70b.py --workdir=/shared/runs/mine
#
# from the folder of Convoy. All arguments are those of `train`. Flags of sbatch go before the name of this file and replace
# what is written here. CONVOY_PYTHON names the interpreter (default: .venv/bin/python).
#
#SBATCH --job-name=convoy
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=convoy-%j.out

# --signal: Slurm tells the processes 300 s before the time limit; they save the same step and end with 75. Give it the time
# of a step and a save, and a minute more. --requeue, --open-mode: the job starts again under its number, and adds to its output.
python="${CONVOY_PYTHON:-.venv/bin/python}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"

newest() { # step of the newest checkpoint
  local flag last= folder=
  for flag; do
    case $flag in --workdir=*) folder=${flag#*=} ;; *) [ "$last" = --workdir ] && folder=$flag ;; esac
    last=$flag
  done
  ls "$folder/checkpoints" 2>/dev/null | grep -x '[0-9]*' | sort -n | tail -n 1
}

# Processes end together by themselves, so that srun has to end none: --kill-on-bad-exit=0, and --wait for one that cannot.
# --cpu-bind=none: the one process of a node uses all its cores.
run=(srun --cpu-bind=none --kill-on-bad-exit=0 --wait=120 "$python" main.py)

code=0
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
  "${run[@]}" preflight "$@"
  code=$?
fi
if [ "$code" = 0 ]; then
  "${run[@]}" train "$@"
  code=$?
fi
case $code in
  0) echo "finished"; exit 0 ;;
  2 | 3 | 4) echo "ended with $code: see the message above; it would be the same the next time"; exit $code ;;
  75) echo "stopped by a signal and saved: going on" ;;
  *) failures="convoy-$SLURM_JOB_ID.failures" # how often in a row without a new checkpoint, and the newest one
     read -r times last 2>/dev/null <"$failures" || times=0
     step=$(newest "$@")
     [ "$step" = "$last" ] && times=$((times + 1)) || times=1
     echo "$times $step" >"$failures"
     if [ "$times" -gt "${CONVOY_RESTARTS:-3}" ]; then
       echo "ended with $code, $times times in a row without a new checkpoint: giving up"
       exit $code
     fi
     echo "ended with $code, as when a machine fails: going on from the newest checkpoint" ;;
esac
scontrol requeue "$SLURM_JOB_ID" || exit $code
