"""The agent under gevent: its threads are greenlets, which take turns, and the watchdog is one of them."""

from gevent import monkey

monkey.patch_all()

import os  # noqa: E402
import runpy  # noqa: E402
import sys  # noqa: E402

from gevent.fileobject import FileObjectPosix  # noqa: E402

# Who waits for the next message must let the others run.
sys.stdin = FileObjectPosix(0, "r")
runpy.run_path(os.path.join(os.path.dirname(__file__), "agent.py"), run_name="__main__")
