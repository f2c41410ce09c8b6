"""Decisions about suspects: on the page in a browser, and in the folder of the scan through `persample review`."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from torch import nn

import persample
from persample.cli import main
from persample.scanning import Scan, ScanError, make_review_server
from persample.scanning.decisions import FILE, Decision, Decisions
from persample.scanning.fixes import read_fixes
from persample.scanning.report import write_report
from tests.support.browser import browser, open_page, playwright  # noqa: F401

COUNT = 48
CLASSES = ["cat", "dog", "owl"]
NAMES = ["=cmd()", *(f"pets/{i}.png" for i in range(1, COUNT))]


@pytest.fixture(scope="module")
def scanned(tmp_path_factory):
    """A scan in which the model contradicts most labels, and its data."""
    torch.manual_seed(0)
    data = torch.rand(COUNT, 1, 6, 6), torch.arange(COUNT) % 3
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    out = tmp_path_factory.mktemp("triage") / "scan"
    scan = persample.scan(
        model, nn.CrossEntropyLoss(), data, out=out, project=16, ids=NAMES, classes=CLASSES, progress=False
    )
    return scan, data


@pytest.fixture
def scan(scanned):
    (scanned[0].directory / FILE).unlink(missing_ok=True)
    return scanned[0]


# ---- the page as a file ----


@pytest.fixture
def page(open_page, scan, scanned, tmp_path):  # noqa: F811
    return open_page(write_report(scan, tmp_path / "report.html", data=scanned[1], k=COUNT, plots=False))


def count_decided(page):
    return page.locator("#decided").inner_text()


def download(page, tmp_path):
    with page.expect_download() as event:
        page.get_by_role("button", name="Download fixes.csv").click()
    event.value.save_as(tmp_path / "fixes.csv")
    with open(tmp_path / "fixes.csv", newline="") as file:
        return {int(row["id"]): row for row in csv.DictReader(file)}


def test_first_screen_answers(page):
    cards = page.locator(".answers li h3").all_inner_texts()
    assert cards == ["Labels that look wrong", "Duplicates", "Outliers", "Broken examples", "Confused classes"]
    steps = page.locator(".steps")
    assert "persample review" in steps.inner_text()
    for selector in (".answers", ".steps"):
        box = page.locator(selector).bounding_box()
        assert box["y"] + box["height"] <= 900  # no scrolling


def test_gallery_groups_by_given_and_suggested_label_with_six_in_a_row(page, scan):
    tops = page.eval_on_selector_all(".card", "cards => cards.map(card => card.offsetTop)")
    assert max(tops.count(top) for top in tops) == 6
    heads = page.locator(".gallery h3").all_inner_texts()
    assert heads and all("→" in head for head in heads[:-1])
    given = {i: one["label"] for i, one in enumerate(scan.describe(range(COUNT)))}
    for card in page.locator(".card").all()[:4]:
        assert card.locator(".labels").inner_text().startswith(given[int(card.get_attribute("data-id"))])
    assert page.locator(".card img").first.evaluate("image => image.naturalWidth") == 6


def test_decisions_by_mouse_and_key_are_counted_undone_kept_and_downloaded(page, scan, tmp_path):
    cards = page.locator(".card")
    ids = [int(card.get_attribute("data-id")) for card in cards.all()]
    cards.nth(0).get_by_role("button", name="accept").click()  # moves on to the next card
    for key in ("k", "r", "u"):
        page.keyboard.press(key)
    assert count_decided(page) == f"4 of {COUNT} decided"
    page.keyboard.press("l")
    choice = page.locator(".card select")
    new = choice.locator("option").nth(1).inner_text()
    choice.select_option(label=new)
    page.keyboard.press("k")
    page.keyboard.press("z")  # takes "keep" back and returns to it
    assert page.evaluate("Number(document.activeElement.dataset.id)") == ids[5]
    assert count_decided(page) == f"5 of {COUNT} decided"
    page.reload()
    assert count_decided(page) == f"5 of {COUNT} decided"  # kept in the browser
    rows = download(page, tmp_path)
    words = ["accept", "keep", "remove", "unsure", "relabel"]
    assert [rows[i]["decision"] for i in ids[:5]] == words and set(rows) == set(ids[:5])
    known = dict(zip(ids, scan.describe(ids), strict=True))
    said = known[ids[0]]["suggested"] or known[ids[0]]["predicted"]
    assert [rows[i]["new_label"] for i in ids[:5]] == [said, "", "remove", "", new]
    fixes = {fix.id: fix for fix in read_fixes(tmp_path / "fixes.csv")}
    assert {fix.name for fix in fixes.values()} == {NAMES[i] for i in (ids[0], ids[2], ids[4])}
    assert fixes[ids[2]].removes and fixes[ids[4]].new == new


def test_names_that_are_formulas_survive_the_download(page, tmp_path):
    page.locator(".card[data-id='0'], #gallery-next").last.scroll_into_view_if_needed()
    if not page.locator(".card[data-id='0']").count():
        page.locator("#gallery-next").click()
    page.locator(".card[data-id='0']").get_by_role("button", name="remove").click()
    row = download(page, tmp_path)[0]
    assert row["name"] == "'=cmd()" and row["key"] == "%3Dcmd()"
    assert [fix.name for fix in read_fixes(tmp_path / "fixes.csv")] == ["=cmd()"]


def test_choice_of_a_pair_and_of_undecided_examples(page):
    pair = page.locator("#pair")
    name = pair.locator("option").nth(2).inner_text()
    pair.select_option(label=name)
    count = int(name.rpartition("(")[2].rstrip(")"))
    assert page.locator(".card").count() == min(count, 30) and page.locator(".gallery h3").count() == 1
    page.locator(".card").first.get_by_role("button", name="keep").click()
    pair.select_option("undecided")
    page.locator("#gallery-next").click()
    assert page.locator(".card").count() == COUNT - 1 - 30


# ---- the server ----


@pytest.fixture
def server(scan, scanned):
    with make_review_server(scan, data=scanned[1], k=COUNT) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def ask(address, body=None, **headers):
    """The status and the content of an answer."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(address, data, headers)) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_server_answers_only_with_its_token_and_its_own_host(server):
    root = server.address.rsplit("/", 2)[0]
    assert server.address.startswith("http://127.0.0.1:") and len(server.token) >= 24
    assert ask(server.address)[0] == 200
    for address in (f"{root}/", f"{root}/{'x' * len(server.token)}/", f"{server.address}../etc/passwd"):
        assert ask(address)[0] == 404
    assert ask(server.address, Host="evil.example")[0] == 404
    assert ask(server.address, Origin="http://evil.example")[0] == 404
    assert ask(f"{server.address}preview/{COUNT}")[0] == 404
    assert json.loads(ask(f"{server.address}preview/3")[1])["kind"] == "image"


@pytest.mark.parametrize(
    "body",
    [
        {"id": COUNT, "word": "keep"},
        {"id": -1, "word": "keep"},
        {"id": True, "word": "keep"},
        {"id": 1, "word": "delete"},
        {"id": 1, "word": "relabel", "label": ["x"]},
        {"id": 1, "word": "relabel", "label": "x" * 5000},
        [1],
    ],
)
def test_server_refuses_other_decisions(server, scan, body):
    assert ask(f"{server.address}decisions", body)[0] == 400
    assert Decisions(scan.directory).read() == {}


def test_decisions_in_a_served_page_are_stored_with_the_scan(browser, server, scan, tmp_path):  # noqa: F811
    context = browser.new_context(viewport={"width": 390, "height": 844}, reduced_motion="reduce")
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(server.address)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    image = page.locator(".card img").first
    image.wait_for()
    assert image.evaluate("image => image.naturalWidth") == 6  # loaded on demand
    first, second = (int(card.get_attribute("data-id")) for card in page.locator(".card").all()[:2])
    with page.expect_response("**/decisions"):
        page.locator(".card").first.get_by_role("button", name="remove").click()
    with page.expect_response("**/decisions"):
        page.keyboard.press("u")
    assert Decisions(scan.directory).read() == {first: Decision("remove"), second: Decision("unsure")}
    with page.expect_response("**/decisions"):
        page.keyboard.press("z")
    assert Decisions(scan.directory).read() == {first: Decision("remove")}
    page.reload()
    playwright.expect(page.locator("#decided")).to_have_text(f"1 of {COUNT} decided")
    context.close()
    assert errors == []
    assert main(["export", str(scan.directory), "--reviewed", "--suspects", str(tmp_path / "fixes.csv")]) == 0
    (fix,) = read_fixes(tmp_path / "fixes.csv")
    assert (fix.id, fix.removes, fix.name) == (first, True, NAMES[first])


# ---- the folder ----


def test_stored_decisions_of_a_damaged_file(tmp_path):
    decisions = Decisions(tmp_path)
    decisions.add(3, Decision("keep"))
    decisions.add(5, Decision("relabel", "=owl"))
    decisions.add(3, Decision("remove"))
    decisions.add(5, None)
    with open(tmp_path / FILE, "a") as file:
        file.write('{"id": 9, "word": "burn"}\n[]\n{"id": 7, "wo')
    assert decisions.read() == {3: Decision("remove")}


def test_no_link_is_followed(tmp_path):
    (tmp_path / "secret").write_text("")
    (tmp_path / FILE).symlink_to(tmp_path / "secret")
    with pytest.raises(ScanError, match="Cannot write"):
        Decisions(tmp_path).add(1, Decision("keep"))
    assert (tmp_path / "secret").read_text() == ""


def test_command_serves_until_it_is_interrupted(scan):
    command = [sys.executable, "-m", "persample", "review", str(scan.directory), "--no-data"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=restore_interrupts)
    address = running.stdout.readline().strip()
    assert b"Decide" in ask(address)[1]
    assert ask(f"{address}decisions", {"id": 2, "word": "relabel", "label": "owl"})[0] == 204
    running.send_signal(signal.SIGINT)
    assert "1 decision: persample export" in running.communicate()[0] and running.returncode == 0
    assert Decisions(Path(Scan(scan.directory).directory)).read() == {2: Decision("relabel", "owl")}


def restore_interrupts():
    """A shell starts background jobs without them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
