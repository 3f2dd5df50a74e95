"""A headless Chromium, driven over a pipe by the DevTools protocol, without a library."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest

from shim.testing.patience import patience

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# In JavaScript: each element with text of its own, its contrast, and what it needs by WCAG 2 (4.5, or 3 if large).
CONTRASTS = """
(() => {
  const luminance = ([r, g, b]) => [r, g, b].map((part) => part / 255)
    .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, place) => sum + part * [0.2126, 0.7152, 0.0722][place], 0);
  const parts = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const behind = (element) => {
    for (let place = element; place; place = place.parentElement) {
      const colour = parts(getComputedStyle(place).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !element.getClientRects().length || element.closest("option, script, style")) continue;
    const style = getComputedStyle(element);
    const text = element instanceof SVGElement ? style.fill : style.color;
    const [one, other] = [luminance(parts(text)), luminance(behind(element))].sort((a, b) => b - a);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
    found.push([element.textContent.trim().slice(0, 60), (one + 0.05) / (other + 0.05), large ? 3 : 4.5]);
  }
  return found;
})()
"""


def installed():
    """The path of a Chromium; the test is skipped if there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("there is no chromium on PATH (Debian: apt-get install chromium)")
    return found


class Chromium:
    """One page of a Chromium. `events` has what it reported, such as requests and errors of scripts."""

    def __init__(self):
        program = installed()
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        its_input, self._to = _pipe()
        self._from, its_output = _pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        command = [program, *options, f"--user-data-dir={self._profile}", "about:blank"]
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        ends = [(os.POSIX_SPAWN_DUP2, its_input, 3), (os.POSIX_SPAWN_DUP2, its_output, 4)]
        self._process = os.posix_spawn(program, command, os.environ, file_actions=[*quiet, *ends])
        os.close(its_input)
        os.close(its_output)
        self._left, self._number, self.events = b"", 0, []
        self._session = {}
        pages = [target for target in self("Target.getTargets")["targetInfos"] if target["type"] == "page"]
        attached = self("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")

    def __call__(self, method, **parameters):
        """The result of one command. What happens before it comes goes to `events`."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            while b"\0" not in self._left:
                read = os.read(self._from, 1 << 20)
                if not read:
                    raise RuntimeError(f"chromium ended before it answered {method}")
                self._left += read
            message, _, self._left = self._left.partition(b"\0")
            told = json.loads(message)
            if told.get("id") != self._number:
                self.events.append(told)
            elif "error" in told:
                raise RuntimeError(f"{method}: {told['error']['message']}")
            else:
                return told["result"]

    def run(self, script):
        """The value of a JavaScript expression."""
        told = self("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise RuntimeError(told["exceptionDetails"]["exception"]["description"])
        return told["result"].get("value")

    def open(self, address, *, width=1280, height=800, dark=False):
        """Load a page at this size, in dark or light, and wait until it is drawn."""
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        self("Page.navigate", url="about:blank")  # an address that differs in its hash alone loads nothing
        self.events.clear()
        self("Page.navigate", url=address)
        until = time.monotonic() + patience()
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            assert time.monotonic() < until, address
            time.sleep(0.02)

    def press(self, key, code=0, text=""):
        for kind in ("keyDown", "keyUp"):
            pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            self(
                "Input.dispatchKeyEvent", type=kind, **pressed, **({"text": text} if kind == "keyDown" and text else {})
            )

    def problems(self):
        """What scripts raised, and what the browser complains about."""
        wrong = [event for event in self.events if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        return [json.dumps(event["params"])[:500] for event in wrong]

    def requests(self):
        asked = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in asked]

    def close(self):
        with contextlib.suppress(OSError, RuntimeError):
            self._session = {}
            self("Browser.close")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._to)
        os.close(self._from)
        shutil.rmtree(self._profile, ignore_errors=True)


def _pipe():
    """Both ends with numbers that the child's 3 and 4 cannot overwrite."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return moved


def address_of(file, hash=""):
    return Path(file).resolve().as_uri() + hash
