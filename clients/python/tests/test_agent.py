"""The agent of the conformance suite answers as the suite's protocol says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

AGENT = Path(__file__).resolve().parents[1] / "agent.py"


class Agent:
    def __init__(self, *options):
        command = [sys.executable, str(AGENT), *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hello, self.sent, self.events = self.line(), 0, []

    def line(self):
        return json.loads(self.process.stdout.readline())

    def send(self, do, **fields):
        self.sent += 1
        self.process.stdin.write(json.dumps({"id": self.sent, "do": do, **fields}) + "\n")
        self.process.stdin.flush()
        return self.sent

    def answer(self, number):
        while (line := self.line()).get("re") != number:
            self.events.append(line)
        return line

    def ask(self, do, **fields):
        return self.answer(self.send(do, **fields))


@pytest.mark.parametrize("options", [[], ["--asyncio"]], ids=["threads", "asyncio"])
def test_an_agent_holds_loses_waits_and_releases(server, client, options):
    agent = Agent(*options)
    assert "block" in agent.hello["can"]
    place = {"kind": "standalone", "addresses": [f"127.0.0.1:{server.port}"]}
    assert agent.ask("open", name="a", place=place, label="agent")["answer"] == "ok"
    held = agent.ask("acquire", client="a", key="book", ttl_ms=900)
    assert held["answer"] == "held"
    assert held["owner"].startswith("agent:")
    assert agent.ask("acquire", client="a", key="book")["answer"] == "busy"
    assert agent.ask("acquire", client="a", key="book", wait_ms=100)["answer"] == "busy"
    assert agent.ask("extend", lock=held["lock"], ms=5000)["answer"] == "yes"
    assert agent.ask("remaining", lock=held["lock"])["remaining_us"] > 4_000_000
    assert agent.ask("info", client="a", key="book")["value"]["fence"] == held["fence"]
    assert agent.ask("fork", lock=held["lock"])["exit"] == 0
    assert {"event": "child", "remaining_us": 0, "lost": True, "renew": "forked"}.items() <= agent.events[-1].items()
    assert agent.ask("release", lock=held["lock"])["answer"] == "yes"
    lost = agent.ask("acquire", client="a", key="book", ttl_ms=300)
    client.delete("book")
    assert agent.ask("block", ms=400, how="sleep")["answer"] == "value"
    again = agent.ask("release", lock=lost["lock"])
    assert (again["answer"], again["why"]) == ("lost", "gone")
    assert agent.ask("run", client="a", key="book", body="fail")["answer"] == "failed"
    assert agent.ask("run", client="a", key="book", body="return")["answer"] == "done"
    turns = agent.ask("turns", client="a", keys=["x", "y"], wait_ms=1000, count=5)
    assert turns["turns"] == 5
    assert agent.ask("acquire", client="a", key="book", ttl_ms=1)["kind"] == "invalid"
    dropped = agent.ask("acquire", client="a", key="book")
    assert agent.ask("drop", lock=dropped["lock"])["answer"] == "ok"
    assert agent.ask("settled")["answer"] == "yes"
    assert client.get("book") is None
    assert agent.ask("many", client="a", prefix="crowd", count=20)["count"] == 20
    assert agent.ask("least")["remaining_us"] > 20_000_000
    agent.ask("drop_many")
    assert agent.ask("settled")["answer"] == "yes"
    assert client.keys("crowd*") == []
    assert agent.ask("close")["threads"] == []
    agent.send("end", how="return")
    assert agent.process.wait(20) == 0
