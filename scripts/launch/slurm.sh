#!/usr/bin/env bash
# Trains on several nodes under SLURM, one task for each GPU:
#
#   sbatch scripts/launch/slurm.sh configs/llama31_8b_128k_8xh100.yaml run.directory=/shared/runs/first
#
# from a folder that all nodes share, with jaxsp's environment activated. Nodes, GPUs and time are options of sbatch too.
# Five minutes before the time is up the run writes a checkpoint and the job queues again; it does so 20 times at most.
# A run that hangs, or has lost a process, starts again within the job, 3 times at most.
#SBATCH --job-name=jaxsp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=jaxsp-%j.log
set -uo pipefail

if [ $# = 0 ]; then
    echo "usage: sbatch $0 CONFIG.yaml [key.path=value ...]" >&2
    exit 2
fi
config=$1
shift

# SIGUSR1 is the warning of --signal above. The tasks are signalled through scancel, because srun answers SIGTERM by killing
# them. (Where scancel or preemption ends the whole job, tasks have KillWait or GraceTime, 30 s unless the cluster says otherwise:
# lower run.shutdown_grace below if that matters more than the end of the time.)
time_is_up=
step=
trap 'time_is_up=yes; [ -z "$step" ] || scancel --signal=TERM "$SLURM_JOB_ID"' USR1

# since SLURM 22.05 srun does not ask sbatch's options for this one
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-8}

# 75: it hung. 134: SIGABRT, by which JAX ends a process when another is lost. 137: a process was killed. srun gives the highest
# of its tasks, and leaves it to them to end each other
for restarts_left in 3 2 1 0; do
    [ -z "$time_is_up" ] || break
    # 270 of the 300 s: starting, and noticing, take some
    srun --kill-on-bad-exit=0 python -m jaxsp.train "$config" run.shutdown_grace=270s "$@" &
    step=$!
    wait "$step"
    code=$?
    while kill -0 "$step" 2> /dev/null; do # the trap ended the wait
        wait "$step"
        code=$?
    done
    step=
    if [ -n "$time_is_up" ] || { [ $code != 75 ] && [ $code != 134 ] && [ $code != 137 ]; }; then
        break
    fi
    echo "$0: exit code $code, $restarts_left restarts left" >&2
done

if [ -n "$time_is_up" ] && [ $code = 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
