"""Drives a headless Chromium over the DevTools protocol: what a page drew, logged and requested."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

_READABILITY = """(() => {
    const parts = color => color.match(/[0-9.]+/g).map(Number)
    const light = color => parts(color).slice(0, 3).map(part => part / 255)
        .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
        .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0)
    const back = each => {
        const color = getComputedStyle(each).backgroundColor
        return parts(color)[3] === 0 && each.parentElement ? back(each.parentElement) : light(color)
    }
    const ratio = (each, property) => {
        const [a, b] = [light(getComputedStyle(each)[property]), back(each.parentElement)]
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)
    }
    const seen = selector => [...document.querySelectorAll(selector)].filter(each => each.getClientRects().length)
    const texts = seen('h1, h2, p, li, th, td, .legend span')
    const labels = seen('svg text')
    return {
        text: Math.min(...texts.map(each => ratio(each, 'color')), ...labels.map(each => ratio(each, 'fill'))),
        curves: Math.min(...seen('polyline').map(each => ratio(each, 'stroke')),
                         ...seen('.legend i').map(each => ratio(each, 'backgroundColor'))),
        size: Math.min(...texts.map(each => parseFloat(getComputedStyle(each).fontSize)),
                       ...labels.map(each => parseFloat(getComputedStyle(each).fontSize) * each.getScreenCTM().a)),
        back: light(getComputedStyle(document.body).backgroundColor),
        sideways: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    }
})()"""


def find_chromium() -> str | None:
    named = os.environ.get("RINGWAY_TEST_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `events` holds every event that the browser sent, in order."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._rest = b""

        def pipes_in_place() -> None:
            # The browser uses descriptors 3 and 4 for the protocol. Copy ours first: they may have these numbers.
            reading, writing = os.dup(to_read), os.dup(to_write)
            os.dup2(reading, 3)
            os.dup2(writing, 4)

        self._process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=pipes_in_place,
        )
        os.close(to_read)
        os.close(to_write)
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.command(f"{domain}.enable", session=True)

    def command(self, method: str, session: bool = False, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                if "error" in reply:
                    raise RuntimeError(reply["error"])
                return reply["result"]
            self.events.append(reply)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._read, 1 << 16)
            if not part:
                raise RuntimeError("the browser is gone")
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def open(self, url: str) -> None:
        self.events.clear()
        self.command("Page.navigate", session=True, url=url)
        deadline = time.monotonic() + 60
        while self.evaluate("document.readyState") != "complete" or self.evaluate("location.href") == "about:blank":
            assert time.monotonic() < deadline, "the page did not load"
            time.sleep(0.05)

    def screen(self, scheme: str, width: int) -> None:
        """Show the next pages in the `light` or the `dark` scheme, on a screen of this width: below 600 px, a phone."""
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.command("Emulation.setEmulatedMedia", session=True, features=media)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", session=True, **size)

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A real event of the mouse: `mouseMoved`, `mousePressed`, `mouseReleased` or `mouseWheel`."""
        self.command("Input.dispatchMouseEvent", session=True, type=kind, x=x, y=y, **more)

    def readability(self) -> dict[str, float]:
        """The least contrast of `text` and of `curves` with what is behind them, the `size` of the smallest text in
        pixels, how light the `back` is (1 is white), and by how many pixels the page scrolls `sideways`."""
        found: dict[str, float] = self.evaluate(_READABILITY)
        return found

    def evaluate(self, expression: str) -> Any:
        result = self.command("Runtime.evaluate", session=True, expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def complaints(self) -> list[Any]:
        """Console errors, warnings and uncaught exceptions."""
        return [
            event["params"]
            for event in self.events
            if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")
            or (event.get("method") == "Runtime.consoleAPICalled" and event["params"]["type"] in ("error", "warning"))
        ]

    def requests(self) -> list[str]:
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
