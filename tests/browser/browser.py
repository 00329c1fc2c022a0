"""A page in a real browser: headless Chromium opens it in frames of several widths and says what it saw."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

TIMEOUT = 60  # seconds after which the browser is killed
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
    "--dump-dom",
]

# A frame made by srcdoc inherits this policy: whatever the page asks of the network, or of the disk, is refused and reported.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; font-src data:"

# Runs in the page before anything of its own does.
SPY = """<script>
window.noted = {errors: [], dialogs: [], requests: []};
for (const kind of ["alert", "confirm", "prompt", "open"]) window[kind] = (text) => { noted.dialogs.push(kind + ": " + text); };
console.error = (...words) => { noted.errors.push(words.join(" ")); };
window.addEventListener("error", (event) => { if (event.message) noted.errors.push(event.message); });
document.addEventListener("securitypolicyviolation", (event) => { noted.requests.push(event.blockedURI); });
</script>"""

MEASURE = """
function numbers(text) { return (text.match(/[\\d.]+/g) || []).map(Number); }
function light([r, g, b]) {
  const part = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
}
function behind(view, node) {
  for (; node; node = node.parentElement) {
    const colour = numbers(view.getComputedStyle(node).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
}
function faintest(view, page) {
  let worst = {ratio: 21, text: ""};
  for (const node of page.body.querySelectorAll("*")) {
    const text = [...node.childNodes].filter((c) => c.nodeType === 3).map((c) => c.data).join("").trim();
    if (!text || node.closest("svg, script, style") || !node.checkVisibility()) continue;
    const ink = light(numbers(view.getComputedStyle(node).color)), paper = light(behind(view, node));
    const ratio = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (ratio < worst.ratio) worst = {ratio, text: text.slice(0, 60)};
  }
  return worst;
}
function measured(frame) {
  const view = frame.contentWindow, page = frame.contentDocument, root = page.documentElement;
  const boxes = [...page.querySelectorAll("figure")].map((figure) => {
    const svg = figure.querySelector("svg"), box = svg ? svg.getBoundingClientRect() : {width: 0, height: 0};
    return [box.width, box.height];
  });
  const broken = [...page.querySelectorAll('a[href^="#"]')].map((a) => a.getAttribute("href"))
    .filter((to) => !page.getElementById(to.slice(1)));
  const fetched = view.performance.getEntriesByType("resource").map((entry) => entry.name);
  return {width: frame.width * 1, scroll: root.scrollWidth, client: root.clientWidth, figures: boxes, broken,
    background: numbers(view.getComputedStyle(page.body).backgroundColor), faintest: faintest(view, page),
    errors: view.noted.errors, dialogs: view.noted.dialogs, requests: [...view.noted.requests, ...fetched]};
}
window.addEventListener("load", () => setTimeout(() => {
  const all = [...document.querySelectorAll("iframe")].map(measured);
  document.getElementById("result").textContent = JSON.stringify(all);
}, 500));
"""


@dataclass(frozen=True)
class View:
    """One page at one width. `figures` are the boxes of the pictures, `requests` what it asked of the network, `broken` its
    links to nowhere, `faintest` the text with the least contrast to what is behind it."""

    width: int
    scroll: float
    client: float
    figures: list[list[float]]
    broken: list[str]
    background: list[float]
    faintest: dict[str, Any]
    errors: list[str]
    dialogs: list[str]
    requests: list[str]
    console: list[str]

    @property
    def overflows(self) -> bool:
        return self.scroll > self.client

    @property
    def is_dark(self) -> bool:
        return max(self.background[:3]) < 80

    @property
    def troubles(self) -> list[str]:
        """All that no page of ours may do."""
        found = [f"at {self.width}: error {e}" for e in [*self.errors, *self.console]]
        found += [f"at {self.width}: dialog {d}" for d in self.dialogs]
        found += [f"at {self.width}: request {r}" for r in self.requests]
        found += [f"at {self.width}: link to nowhere {b}" for b in self.broken]
        found += [f"at {self.width}: figure {i} has no size" for i, box in enumerate(self.figures) if not min(box) > 0]
        if self.overflows:
            found.append(f"at {self.width}: {self.scroll} pixels in {self.client}")
        return found


def find_browser() -> str | None:
    """The browser of this machine; `CHROMIUM` names another one."""
    chosen = os.environ.get("CHROMIUM")
    found = (shutil.which(name) for name in ([chosen] if chosen else NAMES))
    return next((path for path in found if path), None)


def look(page: str, folder: Path, widths: Sequence[int] = (390, 1280), dark: bool = False) -> list[View]:
    """Open the page once per width and measure it."""
    wrapper = folder / "wrapper.html"
    wrapper.write_text(_wrapped(page, widths))
    scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        dom, log = _run([*FLAGS, *scheme, f"--user-data-dir={profile}", wrapper.as_uri()])
    results = re.findall(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
    if not results or not results[-1]:
        raise RuntimeError(f"The browser measured nothing.\n{log[-2000:]}")
    console = re.findall(r"CONSOLE[:(]\d+[\])]*\s*(.*)", log)
    return [View(**seen, console=console) for seen in json.loads(html.unescape(results[-1]))]


def _wrapped(page: str, widths: Sequence[int]) -> str:
    """A page that holds the given one in frames; its doctype stays first, or the frames would be in quirks mode."""
    spied = re.sub(r"<head>|\Z", lambda match: match.group() + SPY, page, count=1)
    frames = "".join(f'<iframe width="{w}" height="900" srcdoc="{html.escape(spied)}"></iframe>' for w in widths)
    return (
        f'<!doctype html><html><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="color-scheme" content="light dark"></head><body>{frames}<pre id="result"></pre>'
        f"<script>{MEASURE}</script></body></html>"
    )


def _run(arguments: list[str]) -> tuple[str, str]:
    """What the browser writes; it and its children are gone afterwards, whatever happens."""
    browser = find_browser()
    assert browser is not None
    process = subprocess.Popen(
        [browser, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        return process.communicate(timeout=TIMEOUT)
    finally:
        with suppress(ProcessLookupError):  # all gone by themselves
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=10)  # closes the pipes
