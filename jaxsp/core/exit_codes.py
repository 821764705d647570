"""Exit codes of the commands."""

OK = 0
INTERNAL_ERROR = 1  # an error in jaxsp or on the machine; the traceback is printed
USER_ERROR = 2  # invalid config, arguments or data
NEEDS_ATTENTION = 3  # the run stopped and needs attention, for example after a NaN loss

HUNG = 75
"""The process hung; the same command resumes from the checkpoint (EX_TEMPFAIL of sysexits.h)."""

INTERRUPTED = 130
