"""The page in a real browser: while a run trains and the server is killed, as a report, and in every state of a run."""

import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page

from fastdiff.config.run_record import claim
from fastdiff.dashboard.folders import key_of
from fastdiff.dashboard.report import write_report
from tests.dashboard.folders import labelled_picture, ledger, lines, picture, record, run_folder, validation
from tests.support.nights import by_day
from tests.support.processes import ON_CPU, stop
from tests.support.runs import flags, tiny
from tests.support.scripts import COMMAND, TRAIN, Script
from tests.support.servers.browser import ADDRESS, chromium, problems_of, until, watch, wide_parts
from tests.support.servers.ports import reserved_port
from tests.support.waiting import LIMIT_S, steps_logged, wait_for_steps, wait_until

SERVER_DIED = re.compile(
    "net::ERR_(CONNECTION_REFUSED|CONNECTION_RESET|SOCKET_NOT_CONNECTED|INCOMPLETE_CHUNKED_ENCODING|EMPTY_RESPONSE"
    "|CONTENT_LENGTH_MISMATCH)"
)
RUN_DELETED = re.compile("404 |status of 404 ")
COLOURS = """Promise.all([...document.querySelectorAll("#prompts .crop")].map(async (crop) => {
  const style = getComputedStyle(crop), image = new Image();
  image.src = style.backgroundImage.slice(5, -2);
  await image.decode();
  const { width, height } = crop.getBoundingClientRect();
  const canvas = new OffscreenCanvas(1, 1), pen = canvas.getContext("2d");
  const [across, down] = style.backgroundSize.split(" ").map((size) => parseFloat(size) / 100);
  const [left, top] = style.backgroundPosition.split(" ").map((place) => parseFloat(place) / 100);
  const x = (left * (across - 1) + 0.5) / across, y = (top * (down - 1) + 0.5) / down;
  pen.drawImage(image, x * image.width, y * image.height, 1, 1, 0, 0, 1, 1);
  return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
}))"""
"""The colours in the middle of the cut-out images."""
FRAME = "new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))"
STEPS = "Store.runs[0]?.columns.step?.mean ?? []"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    found = browser.new_context(viewport={"width": 1280, "height": 900})
    found.set_default_timeout(1000 * LIMIT_S)
    yield found
    found.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A page of a desktop; a script that fails, or a request that fails or asks elsewhere, fails the test."""
    found = context.new_page()
    problems = problems_of(found)
    yield found
    found.close()
    assert problems == []


@contextmanager
def served(page: Page, *runs: str | Path, cwd: Path) -> Iterator[None]:
    """Open the page of runs, which a forked server serves; it is left before its server ends."""
    said = cwd / "watch.log"
    with Script(COMMAND, "watch", *runs, cwd=cwd, output=str(said)) as server:
        wait_until(lambda: not server.process.is_alive() or ADDRESS.search(read(said)) is not None, "the address")
        found = ADDRESS.search(read(said))
        assert found is not None, read(said)
        page.goto(found[0])
        yield
        page.goto("about:blank")


def read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def rich(folder: Path, **config: Any) -> Path:
    """A run with everything that a run can write."""
    run_folder(folder, steps=range(1, 101), **config)
    parts = {"mse_q0": 1.0, "vb": 0.1, "vb_q0": 0.1, "mfu": 0.3, "loss_scale": 2.0}
    records = [record(step, mse=0.9 / step, **parts) for step in range(1, 101)]
    (folder / "metrics.jsonl").write_text(lines(records))
    (folder / "ledger.jsonl").write_text(lines(ledger()))
    (folder / "validation.jsonl").write_text(lines(validation(step, 5 / step) for step in (20, 40, 60, 80, 100)))
    spikes = [
        {"step": 40, "policy": "rewind", "loss": 9.0, "threshold": 2.0, "in_a_row": 1, "keys": ["one", "two"]},
        {"step": 40, "rewound_to": 30, "rewinds": 1, "positions": [480, 640], "first_key": "k1", "last_key": "k2"},
    ]
    (folder / "spikes.jsonl").write_text(lines(spikes))
    (folder / "skipped.jsonl").write_text(lines([{"step": 70, "samples": 1, "keys": ["three"]}]))
    (folder / "damaged.jsonl").write_text(
        lines([{"step": 80, "position": 1, "key": "four", "by": "5", "reason": "crc"}])
    )
    for step in (20, 60, 100):
        picture(folder, step, shade=step)
    return folder


@pytest.fixture(scope="module")
def report_of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of two runs with everything, which differ in their rate."""
    folder = tmp_path_factory.mktemp("two")
    runs = [rich(folder / "a"), rich(folder / "b", optim={"lr": 2e-3})]
    write_report(runs, folder / "out.html")
    return folder / "out.html"


def show_report(page: Page, folder: Path, *runs: Path) -> None:
    write_report(runs, folder / "out.html")
    page.goto((folder / "out.html").as_uri())


def texts(page: Page, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


@pytest.mark.nightly
def test_a_training_run_is_shown_live_and_over_a_death_of_the_server(
    context: BrowserContext, digits: Path, tmp_path: Path
) -> None:
    page = context.new_page()
    problems = problems_of(page)
    run = tmp_path / "runs" / "live"
    port = str(reserved_port())
    config = tiny(digits, run, steps=1_000_000, output__sample_every=20, output__sample_steps=2)
    server, address = watch("--port", port, cwd=tmp_path)
    with ExitStack() as running:
        running.callback(lambda: stop(server))
        page.goto(address)
        page.get_by_text("No run in all runs in runs/ yet").wait_for()
        training = running.enter_context(Script(TRAIN, *flags(config), *ON_CPU))
        page.locator("#loss .line").first.wait_for()
        page.locator(".chip.running").wait_for()
        until(page, f"({STEPS}).length > 20")

        server.send_signal(signal.SIGKILL)
        server.wait()
        page.locator("#connection.lost").wait_for()
        kept = page.evaluate(STEPS)
        assert len(kept) > 20
        assert page.locator("#loss .line").count() == 1, "it keeps what it has"
        wait_for_steps(run, steps_logged(run) + 30)
        assert page.evaluate(STEPS) == kept

        server, again = watch("--port", port, cwd=tmp_path)
        assert again == address
        page.locator("#connection.live").wait_for()
        until(page, f"({STEPS}).length > {len(kept) + 30}")
        page.locator("#samples .large img").wait_for()

        assert training.process.pid is not None
        os.kill(training.process.pid, signal.SIGINT)
        assert training.wait().code == 75
        page.locator(".chip.stopped").wait_for()
        logged = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        until(page, f"({STEPS}).at(-1) === {logged[-1]}")
        steps = page.evaluate(STEPS)
        assert steps == sorted(set(steps)), "nothing twice"
        if len(logged) < 1200:  # not thinned
            assert steps == logged
        shutil.rmtree(run)
        page.locator(".chip.gone").wait_for()
        assert page.locator("#loss .line").count() == 1
        expected = (SERVER_DIED, RUN_DELETED)
        assert [problem for problem in problems if not any(one.search(problem) for one in expected)] == []


def test_a_resumed_run_shows_its_restart_and_nothing_twice(page: Page, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=range(1, 61))
    with served(page, "run", cwd=tmp_path):
        until(page, f"({STEPS}).length === 60")
        (run / "ledger.jsonl").write_text(lines(ledger()))
        replaced = run / "metrics.new"
        replaced.write_text(lines(record(step) for step in range(1, 51)))
        replaced.rename(run / "metrics.jsonl")
        until(page, f"({STEPS}).length === 50")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(lines(record(step) for step in range(51, 100)) + json.dumps(record(100))[:30])
        until(page, f"({STEPS}).length === 99")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record(100))[30:] + "\n")
        until(page, f"({STEPS}).length === 100")
        assert page.evaluate(STEPS) == list(range(1, 101))
        assert page.locator("#loss .restart title").text_content() == (
            "start 2 continues from step 50; before it: exit code 137"
        )


def test_every_card_shows_what_a_run_has_written(page: Page, tmp_path: Path) -> None:
    rich(tmp_path / "a")
    rich(tmp_path / "b", optim={"lr": 2e-3})
    with served(page, "a", "b", cwd=tmp_path):
        until(page, "shownRuns().length === 2")
        page.locator("#loss .line").nth(1).wait_for()
        check_every_card(page)


def check_every_card(page: Page) -> None:
    for card in ("loss", "norm", "rate", "throughput", "wait", "memory", "mfu", "scale", "parts", "validation", "time"):
        assert page.locator(f"#{card} .line").count() >= 2, card
    assert page.locator("#noise image.heat").count() == 2
    assert page.locator("#loss .mark").count() == 6
    assert page.locator("#validation .error").count() == 2 * (5 + 16)
    assert page.locator("#time .gap-name").all_text_contents() == ["unknown 2.0 s", "stop 18 s"] * 2
    assert page.locator("#samples .large img").count() == 2
    assert texts(page, "#samples .columns")[0].split() == [word for n in range(10) for word in ("class", str(n))]
    assert texts(page, ".differences tr") == ["differs\ta\tb", "optim.lr\t0.001\t0.002"]
    assert "rewound to step 30" in page.locator("#events").inner_text()
    assert "damaged sample replaced: crc" in page.locator("#events").inner_text()
    assert page.locator(".card .label", has_text="optimizer steps").count() > 8
    assert wide_parts(page) == []


def test_the_controls_do_what_they_say(page: Page, report_of_two: Path) -> None:
    page.goto(report_of_two.as_uri())
    assert page.evaluate("[0.4, 0.9996, 119.6, 754, 7199, 172799].map(duration)") == [
        "400 ms", "1.0 s", "2.0 min", "13 min", "2.0 h", "2.0 days",
    ]  # fmt: skip
    page.locator("input[value=samples]").check()
    page.locator("#loss .label", has_text="samples").wait_for()
    before = page.locator("#loss .line").first.get_attribute("d")
    page.locator("#smoothing").fill("100")
    until(page, f"document.querySelector('#loss .line').getAttribute('d') !== '{before}'")
    assert page.locator("#smoothed").inner_text() == "over 160 samples"
    page.locator(".runs input").nth(1).uncheck()
    until(page, "document.querySelectorAll('#loss .line').length === 1")
    page.locator(".runs input").first.uncheck()
    page.get_by_text("No run is chosen: tick one above.").wait_for()
    page.locator(".runs input").first.check()
    page.locator("#loss svg").wait_for()
    page.evaluate(FRAME)
    box = page.locator("#loss svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator("#tip", has_text="sample").wait_for()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + box["height"] / 2, steps=3)
    page.mouse.up()
    until(page, "Store.zoom !== null && Store.zoom[0] > 700 && Store.zoom[1] < 1300")
    page.get_by_role("button", name="Show all steps").click()
    until(page, "Store.zoom === null")
    page.locator(".bar input").fill("0")
    page.locator("#samples figcaption", has_text="step 20").first.wait_for()
    page.locator("input[value=change]").check()
    page.locator("#noise .ends", has_text="%").wait_for()


def test_a_report_is_one_file_that_asks_for_nothing(page: Page, tmp_path: Path) -> None:
    rich(tmp_path / "a")
    assert write_report([tmp_path / "a"], tmp_path / "out.html") > 10_000
    shutil.rmtree(tmp_path / "a")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.goto((tmp_path / "out.html").as_uri())
    page.locator("#loss .line").wait_for()
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
    assert [url for url in requests if not url.startswith(("data:", "file:"))] == []
    assert page.locator("#connection").inner_text().startswith("as of 20")


HOSTILE = '<img src=x onerror="document.title=1"></script><script>document.title=1</script>'


@pytest.mark.parametrize("kind", ["watch", "report"])
def test_text_of_a_run_is_never_markup(page: Page, tmp_path: Path, kind: str) -> None:
    run = rich(
        tmp_path / HOSTILE.replace("/", "-"),
        validation={"prompts": [HOSTILE, "b"], "images_per_prompt": 4, "every": 50},
        note=HOSTILE,
    )
    (run / "spikes.jsonl").write_text(
        lines([{"step": 9, "loss": 2.0, "threshold": 1.0, "policy": HOSTILE, "keys": [HOSTILE]}])
    )
    if kind == "report":
        write_report([run], tmp_path / "out.html")
        page.goto((tmp_path / "out.html").as_uri())
        check_text(page)
    else:
        with served(page, run, cwd=tmp_path):
            check_text(page)


def check_text(page: Page) -> None:
    page.locator("#loss .line").wait_for()
    page.locator("summary").click()
    assert page.title() == "fastdiff"
    assert page.locator('img[src="x"]').count() == 0
    assert HOSTILE in page.locator("#prompts").inner_text()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "No picture: its files have none, though the first comes after step 50."),
        (
            {"output": {"sample_every": 500}},
            "No picture: the first comes after step 200, and this run has not come so far.",
        ),
        ({"model": {"low_res_size": 4}}, "This run draws no pictures: super-resolution"),
        ({"output": {"log_every": 10, "sample_every": 0}}, "This run draws no pictures (--output.sample_every 0)."),
        ({"model": {"cross_attention_dim": 32}, "pretrained": {"path": "p"}}, "it has no --validation.prompts"),
    ],
)
def test_a_run_without_pictures_says_why(page: Page, tmp_path: Path, config: dict[str, Any], words: str) -> None:
    show_report(page, tmp_path, run_folder(tmp_path / "run", **config))
    page.locator("#samples", has_text=words).wait_for()


def test_a_run_shorter_than_its_intervals_is_told_of_its_last_step(page: Page, tmp_path: Path) -> None:
    held_out = {"data": "held-out", "every": 1000, "first": None, "prompts": []}
    run = run_folder(
        tmp_path / "run", range(10, 50, 10), samples=60 * 16, validation=held_out, output={"sample_every": 500}
    )
    release = claim(run)
    write_report([run], tmp_path / "out.html")
    release()
    page.goto((tmp_path / "out.html").as_uri())
    page.locator("#samples", has_text="No picture yet: the first comes after step 60, the last one.").wait_for()
    page.locator("#validation", has_text="No validation yet: the first comes after step 60, the last one.").wait_for()


def test_a_failed_run_shows_its_message_first(page: Page, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=())
    told = {"event": "end", "at": 1031.0, "step": 0, "outcome": "DataError", "message": "shard 3 <b>is</b> damaged"}
    (run / "ledger.jsonl").write_text(lines([*ledger()[:2], told]))
    show_report(page, tmp_path, run)
    page.locator("#messages .message", has_text="shard 3 <b>is</b> damaged").wait_for()
    assert "the same command begins anew: there is no checkpoint yet" in page.locator("#messages").inner_text()
    assert texts(page, "#runs td:nth-child(3)") == ["no record"]
    assert texts(page, ".card:visible h2") == [
        "Where the time went",
        "Restarts, spikes and skipped steps",
        "Configuration",
    ]
    page.locator("#runs input").uncheck()
    page.locator("#runs .why", has_text="ended: DataError").wait_for()


def test_what_cannot_be_read_is_named_above_the_cards(page: Page, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write("[[[\n")
    (run / "run.json").unlink()
    (run / "run.json").symlink_to("/etc/hostname")
    show_report(page, tmp_path, run)
    page.locator("#messages", has_text="metrics.jsonl: line 11: no JSON").wait_for()
    assert "run.json: it is a link, which is not followed" in page.locator("#messages").inner_text()


def test_pictures_of_prompts_come_first_and_small_ones_fill_the_card(page: Page, tmp_path: Path) -> None:
    prompts = {"prompts": ["a flower", "a temple"], "images_per_prompt": 1, "every": 50}
    run = run_folder(tmp_path / "run", model={"cross_attention_dim": 32}, pretrained={"path": "p"}, validation=prompts)
    picture(run, 50, size=(130, 66))
    show_report(page, tmp_path, run)
    image = page.locator("#samples .large img")
    image.wait_for()
    assert texts(page, ".card h2")[:3] == ["Samples", "Prompts side by side\nimage 1", "Loss"]
    box = image.bounding_box()
    assert box is not None
    assert box["width"] == pytest.approx(8 * 130, abs=2)
    assert texts(page, "#samples .columns span") == ["a flower", "a temple"]


def test_pictures_of_a_fine_tuning_stand_beside_those_of_its_base(page: Page, tmp_path: Path) -> None:
    """The card of prompts cuts them out of the picture, where their texts are."""
    prompts = {"prompts": ["a flower", "a temple at night, by a lake"], "images_per_prompt": 2, "every": 50}
    run = run_folder(tmp_path / "run", model={"cross_attention_dim": 32}, pretrained={"path": "p"}, validation=prompts)
    for step in (50, 100):
        labelled_picture(run, step, prompts["prompts"])
    show_report(page, tmp_path, run)
    page.locator("#samples .large img").wait_for()
    assert texts(page, "#samples .columns span") == []
    assert texts(page, "#prompts .prompt:first-child figcaption") == ["base", "step 50", "step 100"]
    first = page.locator("#prompts .crop").first.element_handle()
    page.locator("#image").select_option("1")
    page.wait_for_function("(crop) => !crop.isConnected", arg=first)  # the next frame shows the others
    seen = page.evaluate(COLOURS)
    # Red counts the prompts, green the images, and blue is 0 for the base, otherwise a hundredth of the step.
    assert seen == [[40 * prompt, 80, blue] for prompt in (1, 2) for blue in (0, 50, 100)]


def test_columns_have_the_names_of_their_classes(page: Page, tmp_path: Path) -> None:
    """Numbers where there are none; nothing where the picture has them already."""
    for name, names, height in (("a", ["flower", "temple"], 530), ("b", [], 530), ("c", ["flower", "temple"], 548)):
        run = run_folder(tmp_path / name, model={"classes": 2, "kind": "dit"})
        about = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(about | {"class_names": names}))
        picture(run, 50, size=(134, height))
    show_report(page, tmp_path, tmp_path / "a", tmp_path / "b", tmp_path / "c")
    page.locator("#samples .large img").first.wait_for()
    assert texts(page, "#samples .columns span") == ["flower", "temple", "class 0", "class 1"]


def test_an_empty_run_is_named_and_fills_up(page: Page, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=())
    (run / "ledger.jsonl").write_text(lines(ledger()[:3]))
    release = claim(run)
    with served(page, "run", cwd=tmp_path):
        page.locator("#loss", has_text="no record yet: the first comes after step 10").wait_for()
        assert texts(page, "#time .starts td:last-child")[-1] == "running"
        (run / "metrics.jsonl").write_text(lines([record(10)]))
        page.locator("#loss circle").wait_for()
    release()


@pytest.mark.parametrize("width", by_day([320, 1920], 390, 768))
def test_it_fits_every_width(page: Page, report_of_two: Path, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.goto(report_of_two.as_uri())
    page.locator("#loss .line").first.wait_for()
    assert wide_parts(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    scales = "[...document.querySelectorAll('.plot')].map((plot) => plot.clientWidth / plot.viewBox.baseVal.width)"
    drawn = page.evaluate(scales)
    assert len(drawn) > 10
    lines = "((all) => (all.selectNodeContents(one), all.getClientRects().length))(document.createRange())"
    names = f"[...document.querySelectorAll('.differences tbody th')].map((one) => {lines})"
    assert set(page.evaluate(names)) == {1}, "a narrow table scrolls, and breaks no name"
    assert all(0.98 < scale < 1.02 for scale in drawn), "the text of every plot has its size"


@pytest.mark.nightly
def test_a_zoom_is_not_broken_off_by_new_records(page: Page, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", steps=range(1, 101))
    with served(page, "run", cwd=tmp_path):
        page.locator("#loss .line").wait_for()
        box = page.locator("#loss svg").bounding_box()
        assert box is not None
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] / 2, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.6, middle)
        with (run / "metrics.jsonl").open("a") as file:
            file.write(lines(record(step) for step in range(101, 121)))
        until(page, f"({STEPS}).length === 120")
        page.evaluate(FRAME)
        page.mouse.move(box["x"] + box["width"] * 0.75, middle)
        page.mouse.up()
        until(page, "Store.zoom !== null && Store.zoom[0] > 40 && Store.zoom[1] < 85")
        page.locator("#unzoom").click()
        until(page, "Store.zoom === null")
        page.evaluate(FRAME)
        page.mouse.move(box["x"] + box["width"] - 14, middle)
        page.locator("#tip", has_text="step 1").wait_for()
        assert "step 120" in page.locator("#tip").inner_text(), "drawn after the drag"


def test_cards_come_back_after_a_run_without_their_content(page: Page, tmp_path: Path) -> None:
    rich(tmp_path / "a")
    bare = run_folder(tmp_path / "b")
    with served(page, "a", "b", cwd=tmp_path):
        until(page, "shownRuns().length === 2")
        (bare / "run.json").unlink()
        box = page.locator(".runs input").first
        box.uncheck()
        page.locator("#configuration", has_text="No configuration is recorded yet.").wait_for()
        assert page.locator("#samples .empty").count() == 1
        box.check()
        page.locator("#samples .large img").wait_for()
        page.locator("#configuration summary", has_text="Everything").wait_for()


def test_a_run_that_the_server_fails_on_is_marked_and_the_others_go_on(context: BrowserContext, tmp_path: Path) -> None:
    run_folder(tmp_path / "a")
    run_folder(tmp_path / "b")
    page = context.new_page()
    page.route(f"**/runs/{key_of(tmp_path / 'a')}?*", lambda route: route.fulfill(status=500))
    with served(page, tmp_path / "a", tmp_path / "b", cwd=tmp_path):
        page.locator(".state-unreadable, .chip.unreadable").first.wait_for()
        page.locator("#loss .line").wait_for()
        assert page.locator("#connection").inner_text().endswith("Live")
        assert "cannot be read (HTTP 500)" in page.locator(".runs tr").nth(1).inner_text()


def test_a_card_that_fails_says_so_and_the_others_are_drawn(context: BrowserContext, tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    (run / "spikes.jsonl").write_text(lines([{"step": 9, "keys": 3, "loss": 1.0, "threshold": 0.5}]))
    write_report([run], tmp_path / "out.html")
    page = context.new_page()
    page.goto((tmp_path / "out.html").as_uri())
    page.locator("#events", has_text="Restarts, spikes and skipped steps cannot be drawn:").wait_for()
    page.locator("#configuration summary").wait_for()


def test_details_are_open_on_paper_alone_and_the_dark_is_dark(page: Page, tmp_path: Path) -> None:
    rich(tmp_path / "a")
    show_report(page, tmp_path, tmp_path / "a")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(246, 247, 249)"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ground) == "rgb(20, 23, 27)"
    page.emulate_media(media="print")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"
    assert not page.locator("#controls").is_visible()
    assert not page.locator("#configuration dl").first.is_visible()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("#configuration dl").first.is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert not page.locator("#configuration dl").first.is_visible()


def test_a_report_says_what_it_leaves_out(page: Page, tmp_path: Path) -> None:
    prompts = {"validation": {"prompts": ["p", "q"], "images_per_prompt": 2, "every": 1}}
    run = run_folder(tmp_path / "run", **prompts)
    for step in range(1, 31):
        picture(run, step, size=(20, 20))
    show_report(page, tmp_path, run)
    page.locator("#samples .note", has_text="24 of 30 pictures.").wait_for()
    assert texts(page, "#image option") == ["image 1", "image 2"]
    page.evaluate("window.before = document.querySelector('#prompts .crop')")
    page.locator("#smoothing").fill("90")
    page.evaluate(FRAME)
    assert page.evaluate("before.isConnected"), "made anew only if something of it has changed"
    page.locator("#image").select_option("1")
    until(page, "!before.isConnected")


def test_a_long_log_that_is_still_read_says_how_far_it_is(page: Page, tmp_path: Path) -> None:
    show_report(page, tmp_path, run_folder(tmp_path / "run"))
    page.locator("#loss .line").wait_for()
    part = "{ reading: { tag: '', data: { offset: 4e7, size: 9e8 } } }"
    page.evaluate(f"Store.runs[0].isRead = false; takeSections(Store.runs[0], {part}); drawNow()")
    assert page.locator("#reading").inner_text() == "Reading run … 40 of 900 MB"
    assert not page.locator("#cards").is_visible()
