"""Exit codes of the commands."""

OK = 0

INTERNAL_ERROR = 1
"""An error in jaxsp or on the machine; the traceback is printed."""

USER_ERROR = 2
"""Invalid config, arguments or data."""

NEEDS_ATTENTION = 3
"""The run stopped and needs attention, for example after a NaN loss."""

HUNG = 75
"""The process hung; the same command resumes from the checkpoint (EX_TEMPFAIL of sysexits.h)."""

INTERRUPTED = 130
