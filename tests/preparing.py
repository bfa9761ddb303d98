"""What tests of prepared data share: pictures as files, a folder's bytes, and a kill at every flush to the disk."""

import io
import os
from itertools import count

from PIL import Image


def png(pixels):
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def interrupt(*_):
    raise KeyboardInterrupt


def flushes_until_done(attempt, want, folder):
    """Kill attempt(out) at its first flush, at its second and so on, then run it again; return how many flushes it has.

    Every file lands between two flushes: dying at each of them covers every state of the folder. The second run always
    ends with the contents of `want`.
    """
    for last in count():
        out = folder / f"killed-{last}"
        child = os.fork()
        if not child:
            flushed, sync = [], os.fsync

            def die(handle, last=last, flushed=flushed, sync=sync):
                flushed.append(handle)
                sync(handle) if len(flushed) <= last else os._exit(9)

            os.fsync = die
            try:
                attempt(out)
            finally:
                os._exit(0)
        died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        attempt(out)
        assert contents(out) == contents(want)
        if not died:
            return last
    raise AssertionError
