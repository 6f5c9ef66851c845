"""The page of `stretto plan --serve` in a real browser: what is moved changes what is shown, and what is shown is what plan says."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import ENTER, LEFT, RIGHT, Browser, browsing

from stretto.draw.foretold import drawn_microbatches
from stretto.draw.foretold import seconds as time_of
from stretto.draw.numbers import bytes_
from stretto.job import Job
from stretto.launch.planner import server
from stretto.plan.asking import ask
from stretto.plan.choices import Start
from stretto.plan.hardware import Cluster
from stretto.plan.planning import plan_job
from stretto.plan.view import KINDS, View, view

pytestmark = pytest.mark.browser
JOB, CLUSTER = Job.load("llama3-8b"), Cluster.of("2x8 h100")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with server(Start(JOB, CLUSTER), 0) as listening:
        threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}/"
        listening.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as one:
        yield one


def opened(browser: Browser, address: str, fragment: str = "") -> None:
    browser.open("about:blank")
    browser.open(f"{address}#{fragment}")
    browser.wait("document.body.dataset.state === 'ready'")


def settled(browser: Browser) -> None:
    browser.wait("document.body.dataset.state === 'ready'")


def foretold(mesh: str, **keys: object) -> View:
    return view(ask(JOB.with_(mesh=mesh, **keys), CLUSTER, {"mesh"}))


def shown(browser: Browser) -> dict[str, object]:
    """What a person can read of the layout."""
    return {
        "bars": browser.run("return [...document.querySelectorAll('#memory rect > title')].map(one => one.textContent)"),
        "boxes": len(browser.texts("#timeline rect.box[data-m]")),
        "rows": [text for text in browser.texts("#timeline text.name") if text.startswith("rank")],
        "cards": dict(zip(browser.texts(".card span"), browser.texts(".card b"), strict=True)),
        "where": browser.text("#where").splitlines(),
        "why": browser.text("#why"),
        "verdict": browser.text("#verdict"),
    }


def expected(seen: View) -> dict[str, object]:
    """The same of the planner's own answer, in words that are made here."""
    held = [(rank, kind, getattr(memory, kind)) for rank, memory in enumerate(seen.memory) for kind in KINDS]
    setting, plan = seen.row.plan.setting, seen.row.plan
    return {
        "bars": [f"rank {rank}: {kind} {bytes_(amount)}" for rank, kind, amount in held if amount],
        "boxes": 2 * drawn_microbatches(seen.predictor) * setting.stages,
        "rows": [f"rank {rank}" for rank in range(setting.size["pp"])],
        "step": time_of(plan.seconds),
        "mfu": f"{seen.row.mfu:.1%}",
        "peak": f"{plan.memory.peak / 1e9:.1f} GB",
        "where": [part.words for part in seen.where],
        "why": seen.row.why.split("; ")[0],
    }


def assert_shows(browser: Browser, seen: View) -> None:
    found, wanted = shown(browser), expected(seen)
    assert {key: found[key] for key in ("bars", "boxes", "rows")} == {key: wanted[key] for key in ("bars", "boxes", "rows")}
    cards = found["cards"]
    assert isinstance(cards, dict)
    assert (cards["a step"], cards["model flops of the device's peak"], next(v for k, v in cards.items() if "fullest" in k)) == (
        wanted["step"], wanted["mfu"], wanted["peak"],
    )  # fmt: skip
    where, words = found["where"], wanted["where"]
    assert isinstance(where, list) and isinstance(words, list) and set(words) <= set(where)
    assert str(wanted["why"]) in str(found["why"])
    sent = [[wire.words, *(bytes_(amount) if amount else "-" for amount in wire[1:])] for wire in seen.sent]
    assert browser.texts("#wires td") == [cell for line, wire in zip(sent, seen.sent) for cell in (*line, time_of(wire.seconds(CLUSTER)))]


def test_moving_a_slider_changes_bars_timeline_and_reasons_to_what_plan_says(browser: Browser, address: str) -> None:
    opened(browser, address)
    assert_shows(browser, foretold("dp=16"))
    before = shown(browser)
    browser.keys("#choose-pp", RIGHT + RIGHT)  # 1, 2, 4
    settled(browser)
    assert browser.text("#choose-pp + output") == "4"
    assert_shows(browser, foretold("pp=4 dp=4"))
    after = shown(browser)
    assert all(before[key] != after[key] for key in before)
    assert "waiting in the pipeline of 4" in str(after["why"])
    browser.keys("#choose-tp", RIGHT)
    settled(browser)
    assert_shows(browser, foretold("pp=4 dp=2 tp=2"))
    assert browser.text("#choose-dp") == "2"
    assert browser.errors() == []


def test_model_cluster_and_step_can_be_moved_too(browser: Browser, address: str) -> None:
    opened(browser, address)
    browser.keys("#choose-blocks", LEFT * 16)
    browser.keys("#choose-nodes", LEFT)
    settled(browser)
    job = JOB.with_(**{"model.blocks": 16})
    assert_shows(browser, view(ask(job.with_(mesh="dp=8"), CLUSTER.resized(8), {"mesh"})))
    assert "on 1x8 h100 (8 devices" in browser.text("#head")
    browser.click("[data-choice=recompute] label:first-child")
    settled(browser)
    assert_shows(browser, view(ask(job.with_(mesh="dp=8", recompute="none"), CLUSTER.resized(8), {"mesh"})))


def test_a_layout_that_does_not_fit_says_so_and_the_nearest_that_fits_is_a_click_away(browser: Browser, address: str) -> None:
    opened(browser, address, "zero=1&recompute=none&micro=1")
    over = foretold("dp=16", zero=1, recompute="none").over
    assert over and browser.text("#verdict span") == f"dp=16 does not fit: {over}"
    browser.click("#fit")
    settled(browser)
    assert browser.text("#verdict").startswith("dp=16 fits: ")
    assert browser.run("return document.querySelector('[data-choice=recompute] :checked').value") in over


def test_an_error_stands_in_place_and_the_sliders_lead_out_of_it(browser: Browser, address: str) -> None:
    opened(browser, address, "pp=4&schedule=zb-h1&compile=block")
    assert 'pipeline="zb-h1" splits the backward' in browser.text("#verdict.bad") and browser.run(
        "return !!document.querySelector('#layout.off')"
    )
    browser.click("[data-choice=compile] label:first-child")
    settled(browser)
    assert browser.text("#verdict").startswith("pp=4 dp=4 fits: ")


def test_the_address_holds_what_was_chosen(browser: Browser, address: str) -> None:
    opened(browser, address)
    browser.keys("#choose-tp", RIGHT * 3)
    browser.click("[data-choice=zero] label:first-child")
    settled(browser)
    here, seen = str(browser.run("return location.href")), shown(browser)
    opened(browser, here.partition("#")[0], here.partition("#")[2])
    assert shown(browser) == seen
    assert_shows(browser, foretold("dp=2 tp=8", zero=0))


def test_the_best_is_found_and_set_by_a_click(browser: Browser, address: str, tmp_path: Path) -> None:
    opened(browser, address, "tp=8&batch=64")
    browser.click("#findbest")
    browser.wait("document.getElementById('best').dataset.ready")
    planned = plan_job(JOB.with_(mesh="dp=2 tp=8", **{"batch.size": 64}), CLUSTER, (), 8)
    assert browser.texts("#best tr[data-row] td:nth-child(2)") == [str(row.plan.setting.mesh) for row in planned.rows]
    number = next(i for i, row in enumerate(planned.rows) if row is planned.best) + 2  # below the heading
    browser.keys(f"#best tr:nth-child({number})", ENTER)
    settled(browser)
    assert planned.best and dict(zip(browser.texts(".card span"), browser.texts(".card b"), strict=True))["a step"] == time_of(
        planned.best.plan.seconds
    )
    assert browser.run("return document.querySelector('#best tr.now td').textContent") == str(number - 1)
    picture = browser.screenshot(Path(os.environ.get("STRETTO_PICTURES", tmp_path)) / "planner.png")
    assert picture.stat().st_size > 50_000  # a page without style or pictures is smaller
    assert browser.errors() == []
