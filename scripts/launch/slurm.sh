#!/usr/bin/env bash
# Trains on several nodes under SLURM, with one task per node, which drives all its GPUs. Submit it
# from a folder that all nodes share, with jaxsp's environment activated:
#
#   sbatch scripts/launch/slurm.sh configs/llama31_8b_128k_8xh100.yaml \
#       run.directory=/shared/runs/first
#
# Options of sbatch override nodes, GPUs and time. Five minutes before the time limit, the run
# writes a checkpoint and the job is requeued, at most 20 times. A run that hangs or loses a process
# is restarted within the job, at most 3 times.
#SBATCH --job-name=jaxsp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
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

# SLURM sends SIGUSR1 because of --signal above. scancel signals the tasks, because srun responds to
# SIGTERM by killing them. If scancel or preemption ends the whole job, tasks have only KillWait or
# GraceTime (30 s by default): lower run.shutdown_grace below if that case matters more.
time_is_up=
step=
trap 'time_is_up=yes; [ -z "$step" ] || scancel --signal=TERM "$SLURM_JOB_ID"' USR1

# Since SLURM 22.05, srun does not inherit --cpus-per-task from sbatch.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-64}

# Exit codes: 75 the run hung; 134 SIGABRT, with which JAX ends a process when another one is lost;
# 137 a process was killed. srun returns the highest code of its tasks, which end each other.
for restarts_left in 3 2 1 0; do
    [ -z "$time_is_up" ] || break
    # 270 of the 300 s: SLURM and the processes need some time to respond
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
