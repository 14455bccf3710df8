"""Launcher: changes the user, asks the kernel for a signal when the parent dies, then becomes the real command.

Only the standard library, and nothing but `exec` at the end. A launcher rather than `preexec_fn`: code between fork and exec
in a process with threads can deadlock. The user is changed here and not by `subprocess`, because a change of user clears the
request, and because the new user may be unable to reach the interpreter.
Arguments: signal number, pid of the parent, user and group id (or - and -), command.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    death_signal, parent_pid, user_id, group_id, *command = arguments
    if user_id != "-":
        os.setgroups([])
        os.setgid(int(group_id))
        os.setuid(int(user_id))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != int(parent_pid):  # it died between the fork and the request
            sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
