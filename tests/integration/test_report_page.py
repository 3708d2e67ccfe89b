"""The page of a run and that of several, in a real browser without a network: at two widths, light and dark."""

import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from PIL import Image

from tests.unit.test_report import make_two
from trainer.monitor.report.comparison import write_comparison_page
from trainer.monitor.report.recorded import record_times
from trainer.monitor.report.sample_images import save_sample_image
from trainer.monitor.report.write import write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# No host has an address, and what asks a proxy first is refused.
WITHOUT_NETWORK = ["--host-resolver-rules=MAP * ~NOTFOUND", "--proxy-server=127.0.0.1:9"]
SWITCHES = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--force-device-scale-factor=1",
]
GROUND = {"light": (0xF5, 0xF7, 0xFA), "dark": (0x12, 0x16, 0x1B)}
MARGIN = {1400: 60, 420: 5}
"""Columns at both sides that belong to the ground: nothing runs out of the page."""


class Loaded(HTMLParser):
    """Addresses that a page has the browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.images = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect everything that is neither a link to follow nor an image embedded in the page."""
        given = dict(attrs)
        if tag == "img" and (given.pop("src", None) or "").startswith("data:image/jpeg;base64,"):
            self.images += 1
        elif tag in ("script", "link", "img", "iframe", "object", "embed", "video", "audio", "source", "use", "image"):
            self.found.append(tag)
        self.found += [f"{tag} {name}" for name in given if name in ("src", "srcset", "data", "background", "action")]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    runs = make_two(folder)
    record_times(runs[0], {"start": 5.0, "steps": 60.0, "save": 1.0}, resumes=False)
    return {"one": write_report(runs[0]), "several": write_comparison_page(runs, folder / "runs.html")}


@pytest.mark.parametrize("name", ["one", "several"])
def test_a_page_fetches_nothing_and_is_small(name: str, pages: dict[str, Path]) -> None:
    text = pages[name].read_text()
    parser = Loaded()
    parser.feed(text)
    assert parser.found == []
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert len(text) < 1_000_000


def test_sample_images_are_embedded_however_many_there_are(tmp_path: Path) -> None:
    """Noise is what JPEG makes least small."""
    run = make_two(tmp_path)[0]
    random = np.random.default_rng(0)
    whens = ["before", *(f"step-{step}" for step in range(100, 1100, 100)), "after"]
    for prompt in range(9):
        for when in whens:
            noise = random.integers(0, 255, (320, 480, 3), dtype=np.uint8)
            save_sample_image(run, f"<picture> {prompt}", when, Image.fromarray(noise))
    (run / "samples" / "00-after.png").write_bytes(b"damaged")
    text = write_report(run).read_text()
    parser = Loaded()
    parser.feed(text)
    assert parser.found == [] and "samples/" not in text
    assert parser.images == 9 * (24 // 9) - 1
    assert len(text) < 1_000_000
    for prompt in range(1, 9):
        row = text.split(f"<h2>&lt;picture&gt; {prompt}</h2>")[1].split("</section>")[0]
        drawn = [part.partition("<")[0] for part in row.split("<figcaption>")[1:]]
        assert drawn[0] == "before" and drawn[-1] == "after" and len(drawn) == 2


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (Debian: apt-get install chromium)")
@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("name", ["one", "several"])
def test_a_page_is_whole_at_every_width_and_in_both_colours(
    name: str, width: int, colours: str, pages: dict[str, Path], tmp_path: Path
) -> None:
    assert BROWSER is not None
    screenshot = tmp_path / "page.png"
    scheme = f"--blink-settings=preferredColorScheme={int(colours == 'light')}"
    shape = [f"--window-size={width},1800", f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={screenshot}"]
    command = [BROWSER, *SWITCHES, *WITHOUT_NETWORK, scheme, *shape, pages[name].as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    pixels = (255 * imread(screenshot)[..., :3]).round().astype(int)
    ground, margin = np.array(GROUND[colours]), MARGIN[width]
    assert pixels.shape[1] == width
    assert (pixels[:, :margin] == ground).all() and (pixels[:, -margin:] == ground).all()
    # The curves: strong colours, which neither text nor ground has.
    strong = (pixels.max(axis=2) - pixels.min(axis=2)) > 90
    assert strong.sum() > 1500
    assert strong[:, : width // 3].any() and strong[:, -width // 3 :].any(), "over the whole width"


CUT_OFF = """<script>
const parts = [...document.querySelectorAll("section, table, figure")];
const cut = parts.filter(part => part.scrollWidth > part.clientWidth + 1);
document.title = "cut off: " + cut.map(part => part.className || part.textContent.slice(0, 40)).join("; ") + ".";
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine (Debian: apt-get install chromium)")
def test_no_column_of_a_runs_page_is_cut_off_on_a_phone(tmp_path: Path) -> None:
    assert BROWSER is not None
    run = make_two(tmp_path)[0]
    config = json.loads((run / "training_config.json").read_text())
    config["base_model"] = "/shared/models/" + "a-long-name-of-a-model-" * 3
    config["dataset"]["path"] = "/shared/data/" + "of-everything-that-was-ever-said-" * 3
    (run / "training_config.json").write_text(json.dumps(config))
    page = tmp_path / "page.html"
    page.write_text(write_report(run).read_text() + CUT_OFF)
    shape = ["--window-size=420,1800", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    command = [BROWSER, *SWITCHES, *WITHOUT_NETWORK, *shape, page.as_uri()]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    assert "a-long-name" in shown and "<title>cut off: .</title>" in shown, shown.partition("</title>")[0][-300:]
