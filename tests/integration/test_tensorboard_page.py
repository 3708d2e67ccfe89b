"""What Metrics writes is seen by a person: TensorBoard's own page, rendered by a real browser, shows the chart."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from trainer.config import LoggingSection
from trainer.monitor.metrics import Metrics

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LOSSES = [8.0 - 2.0 * step / 100 for step in range(1, 101)]
PATIENCE_S = 300.0


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """TensorBoard on a free port, over events of 100 steps with a loss that falls from 8 to 6."""
    section = LoggingSection(report_to=("tensorboard",), progress="off")
    metrics = Metrics(tmp_path / "run", section, Console(quiet=True), first_step=0, total_steps=len(LOSSES))
    for step, loss in enumerate(LOSSES, start=1):
        metrics.log(step, {"train/loss": loss, "train/learning_rate": 1e-4})
    metrics.close()
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path / "run" / "tensorboard")]
    log = tmp_path / "tensorboard.log"
    with log.open("w") as output:
        # Port 0: the kernel picks a free one, and TensorBoard says which.
        server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", "0"], stdout=output, stderr=output)
    try:
        yield wait_for_address(server, log)
    finally:
        server.terminate()
        server.wait(timeout=300)


def wait_for_address(server: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if found := re.search(r"http://127\.0\.0\.1:\d+/", log.read_text()):
            return found[0]
        assert server.poll() is None, log.read_text()
        time.sleep(0.2)
    pytest.fail(f"TensorBoard did not start in {PATIENCE_S:.0f} s:\n{log.read_text()}")


def rendered(url: str, profile: Path) -> str:
    """The page as the browser has built it, after its scripts have had 20 s of their own time."""
    assert BROWSER is not None
    switches = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic"]
    switches += ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    switches += [f"--user-data-dir={profile}", "--window-size=1400,1000", "--virtual-time-budget=20000", "--dump-dom"]
    finished = subprocess.run([BROWSER, *switches, url], capture_output=True, text=True, timeout=PATIENCE_S)
    return finished.stdout


def ticks_of_chart(page: str, tag: str) -> list[float]:
    """Labels on the vertical axis of a tag's chart; none if the page has no drawn chart of that tag."""
    for card in re.findall(r"<scalar-card .*?</scalar-card>", page, flags=re.DOTALL):
        axis = re.search(r'class="y-axis"(.*?)class="x-axis"', card, flags=re.DOTALL)
        if f'title="{tag}"' in card and "<canvas" in card and axis:
            return [float(label) for label in re.findall(r"<title[^>]*>([\d.]+)</title>", axis[1])]
    return []


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (Debian: apt-get install chromium)")
def test_the_loss_chart_is_on_tensorboards_page(address: str, tmp_path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    ticks: list[float] = []
    # The server reads the events after it has opened its port: an early page has no chart yet, or an empty one.
    while time.monotonic() < deadline and not (ticks and min(ticks) > 1):
        ticks = ticks_of_chart(
            rendered(f"{address}?tagFilter=train%2Floss#timeseries", tmp_path / "profile"), "train/loss"
        )
    assert len(ticks) >= 3
    # The axis was fitted to the data that we logged, the extreme values left out as outliers at most.
    assert 5.5 <= min(ticks) < 6.5 and 7.5 < max(ticks) <= 8.5
