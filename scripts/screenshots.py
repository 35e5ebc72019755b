"""Makes the screenshots of the documentation, in docs/images, with headless Chromium (make screenshots).

    python scripts/screenshots.py                   docs/images/{top,report,bench}.png and their dark versions
    python scripts/screenshots.py --look FOLDER     whole pages at 390 and 1440 px too, light and dark, to look at

`ringway report` and `ringway top` show a job of four ranks (screenshot_job.py), `ringway bench` this machine. Exits
with 1 if a page logs an error, asks for something, or is wider than the screen.
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path
from typing import Any

import proofs

sys.path.insert(0, str(proofs.ROOT / "tests"))
from browser import Browser, find_chromium

IMAGES = proofs.ROOT / "docs" / "images"
JOB = Path(__file__).with_name("screenshot_job.py")
SCHEMES = ("light", "dark")
WIDTHS = (390, 1440)
SHOWN = {"top": (960, None), "report": (1440, 900), "bench": (1440, 900)}
"""Width and height of the committed pictures. None: the height of the page."""
LARGEST = 300_000
BENCH = ("-n", "2", "--backends", "shm,gloo", "--ops", "all_reduce,all_gather,broadcast,all_to_all_single,pairs")
BENCH_SIZES = ("--sizes", "8:16M:x8")
TERMINAL = """<!doctype html><html lang='en'><head><meta charset='utf-8'><title>ringway top</title>
<meta name='viewport' content='width=device-width, initial-scale=1'>
<style>:root {{ --back: #fff; --text: #1b1f24; --faint: #d6dae0; --bad: #b91c1c }}
@media (prefers-color-scheme: dark) {{ :root {{ --back: #14171c; --text: #e6e9ee; --faint: #343b45; --bad: #ff7d7d }} }}
body {{ background: var(--back); color: var(--text); margin: 0; padding: 14px }}
pre {{ border: 1px solid var(--faint); border-radius: 8px; font: 14px/1.5 ui-monospace, monospace; margin: 0;
  overflow-x: auto; padding: 14px }} .bad {{ color: var(--bad) }} .bold {{ font-weight: 600 }}</style></head>
<body><pre>{text}</pre></body></html>
"""


def ringway(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ringway", *arguments]
    return subprocess.run(command, check=True, timeout=600, text=True, **more)


def pages(folder: Path, wanted: list[str]) -> dict[str, Path]:
    """The pages, by name."""
    made = {name: folder / f"{name}.html" for name in SHOWN}
    if "bench" in wanted:
        ringway("bench", *BENCH, *BENCH_SIZES, "--html", str(made["bench"]), cwd=folder, stdout=subprocess.DEVNULL)
    if wanted == ["bench"]:
        return made
    trace, until = folder / "trace.json", folder / "until"
    shutil.copy(JOB, folder / "train.py")  # under this name, and without a path, in the pictures
    job = [sys.executable, "-m", "ringway", "run", "-n", "4", "train.py", trace.name, until.name]
    with subprocess.Popen(job, cwd=folder, stderr=subprocess.DEVNULL) as running:
        while not until.with_suffix(".now").exists():
            if running.poll() is not None:
                raise SystemExit(f"the job ended with {running.returncode}")
            time.sleep(0.1)
        time.sleep(12)  # a call that waits for more than 10 s is red
        colored = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "108", "TERM": "xterm-256color"}
        shown = ringway("top", "--once", env=colored, stdout=subprocess.PIPE).stdout
        until.touch()
    made["top"].write_text(TERMINAL.format(text=as_html(f"$ ringway top\n{shown}")))
    ringway("report", str(trace), "-o", str(made["report"]))
    return made


def as_html(terminal: str) -> str:
    """What a terminal shows, with its bold and its red."""
    from rich.text import Text

    text = Text.from_ansi(terminal.rstrip())
    pieces, at = [], 0
    for span in sorted(text.spans, key=lambda span: span.start):
        style = str(span.style)
        kind = "bad" if "color(1)" in style or "red" in style else "bold" if "bold" in style else ""
        pieces.append(escape(text.plain[at : span.start]))
        pieces.append(f"<span class='{kind}'>{escape(text.plain[span.start : span.end])}</span>")
        at = span.end
    return "".join([*pieces, escape(text.plain[at:])])


class Camera:
    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self.complaints: list[str] = []

    def shoot(self, page: Path, to: Path, scheme: str, width: int, height: int | None) -> None:
        browser = self._browser
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.command("Emulation.setEmulatedMedia", session=True, features=[feature])
        screen = {"width": width, "height": height or 900, "deviceScaleFactor": 1, "mobile": width < 600}
        browser.command("Emulation.setDeviceMetricsOverride", session=True, **screen)
        browser.open(page.as_uri())
        time.sleep(0.5)
        where = f"{page.stem} at {width} px, {scheme}"
        self.complaints += [f"{where}: {found}" for found in browser.complaints()]
        self.complaints += [f"{where} asks for {url}" for url in browser.requests() if url != page.as_uri()]
        wide = browser.evaluate("document.documentElement.scrollWidth")
        if wide > width:
            self.complaints.append(f"{where}: it is {wide} px wide")
        tall = height or int(browser.evaluate("Math.ceil(document.body.getBoundingClientRect().bottom)"))
        clip = {"x": 0, "y": 0, "width": width, "height": tall, "scale": 1}
        shot = browser.command("Page.captureScreenshot", session=True, clip=clip, captureBeyondViewport=True)
        to.parent.mkdir(parents=True, exist_ok=True)
        to.write_bytes(base64.b64decode(shot["data"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--look", type=Path, metavar="FOLDER", help="where whole pages go")
    parser.add_argument("--only", choices=SHOWN, nargs="+", default=list(SHOWN), help="these pages only")
    given = parser.parse_args()
    program = find_chromium()
    if program is None:
        print("no Chromium is installed", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as name:
        made = pages(Path(name), given.only)
        browser = Browser(program, Path(name, "profile"))
        try:
            camera = Camera(browser)
            for page, (width, height) in ((page, SHOWN[page]) for page in given.only):
                for scheme in SCHEMES:
                    to = IMAGES / f"{page}{'-dark' if scheme == 'dark' else ''}.png"
                    camera.shoot(made[page], to, scheme, width, height)
                    print(f"{to.relative_to(proofs.ROOT)}, {to.stat().st_size / 1e3:.0f} kB")
                    if to.stat().st_size > LARGEST:
                        camera.complaints.append(f"{to.name} has more than {LARGEST / 1e3:.0f} kB")
                    for wide in WIDTHS if given.look else ():
                        camera.shoot(made[page], given.look / f"{page}-{wide}-{scheme}.png", scheme, wide, None)
        finally:
            browser.close()
    print("\n".join(camera.complaints))
    return 1 if camera.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
