"""One measuring run of a machine at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time


@contextlib.contextmanager
def machine_lock(announce=lambda words: None):
    """Held by one measuring run of a machine at a time, whoever its user is.

    Of those who wait, one stands at the lock itself and the others for its place: so a program that measures again and
    again waits behind it, and does not starve it. Calls `announce(words)` once if it has to wait. Raises OSError where
    the locks' files cannot be used.
    """
    place, lock = _open_lock_file("pcourse-next.lock"), _open_lock_file("pcourse-measuring.lock")
    told = False
    try:
        for handle in (place, lock):
            while not _try_lock(handle):  # a call that blocks could not be interrupted from a notebook
                if not told:
                    announce("another run is measuring on this machine; waiting for it")
                told = True
                time.sleep(0.1)
        fcntl.flock(place, fcntl.LOCK_UN)
        yield
    finally:
        for handle in (place, lock):
            fcntl.flock(handle, fcntl.LOCK_UN)  # closing alone would not do while a forked child holds a copy
            os.close(handle)


def _open_lock_file(name: str) -> int:
    path = os.path.join(tempfile.gettempdir(), name)
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        # Linux refuses O_CREAT on another user's file in a sticky folder: an existing one is opened without.
        with contextlib.suppress(FileNotFoundError):
            return os.open(path, flags)
        with contextlib.suppress(FileExistsError):
            handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(handle, 0o666)  # the umask may have taken away what other users need
            return handle


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
