"""A limit of threads and processes that is reached: the kernel refuses each further one with EAGAIN."""

import ctypes
import errno
import os
import platform
import struct

_NUMBERS = {"x86_64": (56, 57, 58, 435), "aarch64": (220, 435)}
"""System calls clone, fork, vfork and clone3."""
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def forbid_threads() -> None:
    """Let this thread, and the program that it becomes by exec, start no thread and no process; there is no way back.

    A filter of system calls (seccomp) holds for any user, also for root, whom ``ulimit -u`` does not bind.
    """
    numbers = _NUMBERS[platform.machine()]
    steps = [(_LOAD, 0, 0)]
    steps += [(_IF_EQUAL, len(numbers) - place, number) for place, number in enumerate(numbers)]
    steps += [(_RETURN, 0, _ALLOW), (_RETURN, 0, _ERROR | errno.EAGAIN)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", kind, to, 0, value) for kind, to, value in steps))
    program = _Program(len(steps), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
