"""The report in a browser: with pointer and keyboard, on desktop and mobile screens."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import persample
from persample.scanning.report import write_report
from persample.scanning.report.previews import MarkedText
from tests.support.browser import browser, open_page, playwright  # noqa: F401

CLASSES = ["cat", "dog", "owl", "<img src=x onerror=alert(1)>"]
COUNT, SUSPECTS = 120, 20


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A page with all sections, and a page with long texts."""
    torch.manual_seed(0)
    x, y = torch.rand(COUNT, 1, 6, 6), torch.arange(COUNT) % 4
    x *= 10 ** torch.linspace(-2, 1, COUNT)[:, None, None, None]  # so that the numbers have different numbers of digits
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 4))
    scan = persample.scan(model, nn.CrossEntropyLoss(), (x, y), project=None, classes=CLASSES)
    first = scan.ranked().ids[:3].tolist()
    notes = {first[0]: "label flipped", first[1]: "<b>bold</b> " + "w" * 120}
    options = {"notes": notes, "k": SUSPECTS, "plots": False, "remarks": ["Long" * 60]}
    folder = tmp_path_factory.mktemp("report")
    write_report(scan, folder / "texts.html", data=(x, y), show=lambda e: "word " * 20 + "unbroken" * 40, **options)
    return write_report(scan, folder / "report.html", data=(x, y), **options)


@pytest.fixture
def opened(open_page, report):  # noqa: F811
    """Open the report, or another page beside it."""
    return lambda width=1280, height=900, name="report.html", **options: open_page(
        report.with_name(name), width, height, **options
    )


def column(page, name):
    """The texts of a column in the visible rows."""
    return page.eval_on_selector_all(
        f"#table tbody tr:not([hidden]) td[data-name='{name}']", "cells => cells.map(cell => cell.textContent.trim())"
    )


def parse_number(text):
    digits, _, power = text.replace("−", "-").replace(",", "").partition("×10")
    return float(digits) * 10.0 ** int(power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")) or 0)


def get_box(page, selector):
    return page.eval_on_selector(
        selector, "e => (({x, y, width, height}) => [x, y, width, height])(e.getBoundingClientRect())"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_opens_from_a_file_and_is_not_blank(opened, scheme):
    page = opened(color_scheme=scheme)
    assert page.title() == "Dataset scan · persample"
    shot = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("L"), dtype=float)
    assert (np.median(shot) > 200) == (scheme == "light")
    assert (abs(shot - np.median(shot)) > 60).mean() > 0.005  # there is text on the page
    sizes = page.eval_on_selector_all("#table img", "images => images.map(i => [i.naturalWidth, i.width, i.alt])")
    assert len(sizes) == SUSPECTS and all(natural == 6 and width >= 40 and alt for natural, width, alt in sizes)


@pytest.mark.parametrize("device", ["click", "keyboard"])
def test_numbers_are_sorted_as_numbers(opened, device):
    page = opened()
    page.get_by_label("Scores").check()
    for name in ("Id", "Loss", "Gradient norm", "Self-influence", "Alignment", "Rank"):
        check_sorting(page, name, device)


def check_sorting(page, name, device):
    button = page.get_by_role("button", name=name, exact=True)
    head = button.locator("..")
    seen = {}
    for _ in range(2):
        if device == "click":
            button.click()
        else:
            button.focus()
            page.keyboard.press("Enter")
        seen[head.get_attribute("aria-sort")] = [parse_number(text) for text in column(page, name)]
        assert page.locator("#table th[aria-sort]").count() == 1
    assert set(seen) == {"ascending", "descending"}
    assert seen["ascending"] == sorted(seen["ascending"]) and len(set(seen["ascending"])) > 5
    assert seen["descending"] == sorted(seen["descending"], reverse=True)


def test_texts_are_sorted_with_empty_ones_last(opened):
    page = opened()
    for direction in ("ascending", "descending"):
        page.locator("#table th button", has_text="Note").click()
        notes = column(page, "Note")
        assert all(notes[:2]) and not any(notes[2:])
        assert page.locator("#table th[aria-sort]").get_attribute("aria-sort") == direction
    page.locator("#table th button", has_text="Label").click()
    assert [CLASSES.index(label) for label in column(page, "Label")] == sorted(
        map(CLASSES.index, column(page, "Label")), key=lambda i: CLASSES[i]
    )


def test_filter_by_text_and_class(opened):
    page = opened()
    count = page.locator("#count")
    assert count.inner_text() == f"{SUSPECTS} of {SUSPECTS} suspects shown" and count.get_attribute("aria-live")
    page.get_by_label("Search").fill("FLIPPED")
    assert len(column(page, "Id")) == 1 and count.inner_text() == f"1 of {SUSPECTS} suspects shown"
    page.get_by_label("Search").fill("")
    labels = column(page, "Label")
    for label in set(labels):
        page.get_by_label("Class", exact=True).select_option(label=label)
        assert column(page, "Label") == [label] * labels.count(label)
    page.get_by_label("Search").fill("nothing like it")
    assert count.inner_text() == f"0 of {SUSPECTS} suspects shown" and not page.locator("#table").is_visible()
    page.get_by_role("button", name="Show all suspects").click()
    assert len(column(page, "Id")) == SUSPECTS and page.locator("#table").is_visible()
    assert not page.locator("#no-rows").is_visible()


def test_sorting_keeps_the_filter(opened):
    page = opened()
    label = column(page, "Label")[0]
    page.get_by_label("Class", exact=True).select_option(label=label)
    before = column(page, "Id")
    page.locator("#table th button", has_text="Id").click()
    assert column(page, "Id") == sorted(before, key=int)


def test_circles_are_inside_the_plot_and_have_class_colours(opened):
    page = opened()
    left, top, width, height = get_box(page, "#plot")
    circles = page.eval_on_selector_all(
        ".points circle",
        """all => all.map(c => [c.getBoundingClientRect(), getComputedStyle(c).fill])
                     .map(([b, fill]) => [b.left, b.top, b.right, b.bottom, fill])""",
    )
    assert len(circles) == COUNT and len({colour for *_, colour in circles}) == len(CLASSES)
    for x0, y0, x1, y1, _ in circles:
        assert left <= x0 < x1 <= left + width and top <= y0 < y1 <= top + height
    across = [x0 for x0, *_ in circles]
    assert max(across) - min(across) > 0.5 * width  # they use the width of the plot
    legend = page.eval_on_selector_all("#legend .dot", "dots => dots.map(d => getComputedStyle(d).backgroundColor)")
    assert set(legend) == {colour for *_, colour in circles}


def get_details(page):
    """Names and values of the selected example."""
    names = page.eval_on_selector_all("#known dt", "all => all.map(e => e.textContent)")
    return dict(zip(names, page.eval_on_selector_all("#known dd", "all => all.map(e => e.textContent)"), strict=True))


def test_pointing_at_a_circle_shows_the_example(opened):
    page = opened()
    page.locator("#plot").scroll_into_view_if_needed()
    points = page.evaluate("JSON.parse(document.getElementById('points').textContent)")
    hit = 0
    for i in (0, COUNT // 2, COUNT - 2):
        page.locator(".points circle").nth(i).hover(force=True)
        details = get_details(page)
        assert page.locator("#stage img").evaluate("image => image.naturalWidth") == 6
        assert page.locator("#stage img").get_attribute("alt") == f"Example {details['Id']}"
        point = next(one for one in points if str(one["id"]) == details["Id"])
        shown = (details["Label"], details["Loss"], details["Gradient norm"])
        assert shown == (point["label"], point["loss"], point["norm"])
        hit += points[i]["id"] == point["id"]  # another circle may be at the same position
    assert hit >= 2


def test_arrow_keys_select_examples(opened):
    page = opened()
    page.locator("#plot").focus()
    page.keyboard.press("Home")
    details = get_details(page)
    assert details["Suspect"] == "no. 1" and page.locator("#known-note").inner_text() == "label flipped"
    losses = []
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
        losses.append(parse_number(get_details(page)["Loss"]))
        spoken = page.locator("#spoken").text_content()
        assert f"Id {get_details(page)['Id']}" in spoken and f"Loss {get_details(page)['Loss']}" in spoken
        assert page.locator("#stage img").count() == 1
    assert losses == sorted(losses, reverse=True) and len(set(losses)) > 1
    norm = parse_number(get_details(page)["Gradient norm"])
    page.keyboard.press("ArrowDown")
    assert parse_number(get_details(page)["Gradient norm"]) <= norm
    ring, plot = get_box(page, "#marker"), get_box(page, "#plot")
    assert plot[0] <= ring[0] + ring[2] / 2 <= plot[0] + plot[2]


def test_tab_reaches_the_scatter_plot_with_visible_focus(opened):
    page = opened()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the suspects"
    assert get_box(page, ".skip")[1] >= 0
    for _ in range(120):
        page.keyboard.press("Tab")
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
        if page.evaluate("document.activeElement.id") == "plot":
            return
    raise AssertionError("Tab does not reach the scatter plot")


def test_legend_selects_classes(opened):
    page = opened()
    button = page.locator("#legend button").nth(1)
    button.click()
    assert button.get_attribute("aria-pressed") == "true"
    visible = page.eval_on_selector_all(
        ".points circle",
        "all => all.filter(c => getComputedStyle(c).visibility === 'visible').map(c => c.dataset.class)",
    )
    assert visible == ["1"] * (COUNT // 4)
    page.locator("#plot").focus()
    page.keyboard.press("ArrowLeft")
    assert get_details(page)["Label"] == CLASSES[1]
    button.click()
    assert page.locator(".points .faded").count() == 0


def test_link_to_the_table_shows_a_filtered_row(opened):
    page = opened()
    page.get_by_label("Search").fill("nothing like it")
    page.locator("#plot").focus()
    page.keyboard.press("Home")
    page.get_by_role("link", name="See it in the table").click()
    row = page.locator(f"#example-{get_details(page)['Id']}")
    playwright.expect(row).to_be_in_viewport()


@pytest.mark.parametrize("name", ["report.html", "texts.html"])
def test_page_does_not_scroll_horizontally(opened, name):
    page = opened(name=name)
    for width in (320, 390, 768, 1024, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        check_width(page, width)


def check_width(page, width):
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = page.eval_on_selector_all(
        "h1, h2, p, dl, .cards li, figure, .filters input, .legend li, .detail",
        """(all, width) => all.filter(e => e.checkVisibility() && e.getBoundingClientRect().right > width + 1)
                              .map(e => e.outerHTML)""",
        width,
    )
    assert outside == []


def make_masks():
    """A segmentation model with its data."""
    x, masks = torch.rand(12, 3, 16, 16), torch.randint(3, (12, 16, 16))
    return nn.Conv2d(3, 3, 1), (x, masks)


def make_many_classes():
    """A classifier of as many classes as a confusion table has."""
    return nn.Linear(4, 12), (torch.randn(60, 4), torch.arange(60) % 12)


def make_vectors():
    """Regression with five outputs."""
    return nn.Linear(4, 5), (torch.randn(20, 4), torch.randn(20, 5))


@pytest.mark.parametrize(
    ("make", "loss_fn"),
    [(make_masks, nn.CrossEntropyLoss()), (make_many_classes, nn.CrossEntropyLoss()), (make_vectors, nn.MSELoss())],
)
def test_wide_contents_fit_a_phone(open_page, tmp_path, make, loss_fn):  # noqa: F811
    torch.manual_seed(0)
    model, data = make()
    scan = persample.scan(model, loss_fn, data, project=16)
    page = open_page(write_report(scan, tmp_path / "report.html", data=data, plots=False), 320, 800)
    check_width(page, 320)
    overlaps = page.eval_on_selector_all(
        "#table tbody tr:not([hidden])",
        """rows => rows.map(row => [...row.cells].map(cell => cell.getBoundingClientRect()).filter(box => box.width))
            .filter(boxes => boxes.some((a, i) => boxes.some((b, j) => i < j && a.left < b.right - 1
                && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1))).length""",
    )
    assert overlaps == 0
    inside = page.eval_on_selector_all(
        "#table tbody tr:not([hidden]) img",
        "all => all.every(i => i.closest('td').getBoundingClientRect().right + 1 >= i.getBoundingClientRect().right)",
    )
    assert inside


def test_rows_are_sortable_cards_on_a_phone(opened):
    page = opened(width=390, height=844, has_touch=True, is_mobile=True)
    left, _, width, height = get_box(page, "#table tbody tr")
    assert left >= 0 and left + width <= 390 and 40 < height < 110  # one short card
    page.get_by_label("Scores").check()
    page.locator("#table th button", has_text="Loss").tap()
    losses = [parse_number(text) for text in column(page, "Loss")]
    assert losses == sorted(losses, reverse=True)


def test_page_without_javascript(opened):
    page = opened(java_script_enabled=False)
    assert page.locator("#table tbody tr:visible").count() == SUSPECTS
    assert page.locator(".points circle").count() == COUNT
    assert not page.locator(".filters").is_visible() and not page.locator("#detail").is_visible()


def test_names_from_the_data_are_escaped(opened):
    page = opened()
    assert CLASSES[3] in page.locator("#legend").inner_text() and "<b>bold</b>" in page.locator("#table").inner_text()
    assert page.locator("img[src='x'], #table td b").count() == 0


# ---- what the model says, similar examples, pages ----


@pytest.fixture(scope="module")
def long_report(tmp_path_factory):
    """A page with several pages of examples, names, predictions and similar gradients."""
    torch.manual_seed(0)
    x, y = torch.rand(90, 1, 6, 6), torch.arange(90) % 3
    x[1] = x[0]
    y[1] = y[0]  # a duplicate
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    names = [f"folder/<b>{i}</b>.png" for i in range(90)]
    scan = persample.scan(model, nn.CrossEntropyLoss(), (x, y), project=64, classes=["cat", "dog", "owl"], ids=names)
    path = tmp_path_factory.mktemp("long") / "report.html"
    return scan, write_report(scan, path, data=(x, y), k=60, plots=False)


@pytest.fixture
def long_page(browser, long_report):  # noqa: F811
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(120_000)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    page.goto(long_report[1].as_uri())
    yield page
    context.close()
    assert errors == []


def test_long_lists_have_pages(long_page):
    shown = lambda: long_page.locator("#table tbody tr:visible").count()  # noqa: E731
    assert shown() == 25 and long_page.locator("#page-number").inner_text() == "Page 1 of 3"
    assert long_page.locator("#count").inner_text() == "60 of 60 suspects shown"
    assert long_page.get_by_role("button", name="Previous", exact=True).is_disabled()
    long_page.get_by_role("button", name="Next", exact=True).click()
    long_page.get_by_role("button", name="Next", exact=True).focus()
    long_page.keyboard.press("Enter")
    assert shown() == 10 and column(long_page, "Rank")[0] == "51"
    assert long_page.get_by_role("button", name="Next", exact=True).is_disabled()
    long_page.locator("#table th button", has_text="Rank").click()  # sorting goes back to the first page
    assert column(long_page, "Rank")[0] == "60"
    long_page.get_by_label("Search").fill("folder/<b>7</b>")
    assert shown() <= 1 and not long_page.locator("#pages").is_visible()


def test_similar_examples_open_on_click_and_lead_to_their_row(long_page, long_report):
    scan = long_report[0]
    row = long_page.locator("#table tbody tr").first
    assert not row.locator(".similar ul").is_visible()
    row.locator(".similar summary").click()
    assert row.locator(".similar ul").is_visible()
    first = int(scan.ranked(k=1).ids[0])
    expected = scan.neighbours(first, 4).ids.tolist()
    texts = row.locator(".similar .one").all_inner_texts()
    assert [int(text.strip().split(",")[0]) for text in texts] == expected
    listed = scan.ranked(k=60).ids.tolist()
    for link in long_page.locator('.similar a[href^="#example-"]').all()[:1]:
        target = int(link.get_attribute("href").rpartition("-")[2])
        link.evaluate("e => e.closest('details').open = true")
        link.evaluate("e => e.click()")
        assert target in listed and long_page.locator(f"#example-{target}").is_visible()


def test_predictions_names_and_confusion_are_shown(long_page, long_report):
    scan = long_report[0]
    first = scan.describe(scan.ranked(k=1).ids)[0]
    row = long_page.locator("#table tbody tr").first
    assert row.locator(".name").inner_text() == first["name"]
    assert column(long_page, "Model says")[0] == f"{first['predicted']} ({first['probability']:.2f})"
    cells = long_page.locator(".confusion tbody td").all_inner_texts()
    assert sum(int(cell or 0) for cell in cells) == 90
    assert long_page.locator("#table th button", has_text="Loss").first.get_attribute("title")
    tops = [
        get_box(long_page, selector)[1]
        for selector in ("#summary", "#triage", "#suspects", "#confusion", "#details", "#scatter")
    ]
    assert tops == sorted(tops)  # answers first, charts last


@pytest.fixture
def marked_page(open_page, tmp_path):  # noqa: F811
    """A page with two kinds of marks. The first text has both, the second only marks by loss."""
    x, y = torch.randn(12, 3), torch.arange(12) % 2
    scan = persample.scan(nn.Linear(3, 2), nn.CrossEntropyLoss(), (x, y), project=None)
    both = MarkedText("one two three", {"token_gradient": [(0, 3), (4, 7)], "token_loss": [(4, 7), (8, 13)]})
    first = scan.ranked().ids[0].item()
    texts = {i: both if i == first else MarkedText("four five", {"token_loss": [(0, 4)]}, "no rows") for i in range(12)}
    examples = [(texts[i], 0) for i in range(12)]
    return open_page(write_report(scan, tmp_path / "report.html", data=examples, show=lambda e: e[0], plots=False))


def get_marked(page, row):
    """The words with a background in the text of a row."""
    return (
        page.locator("#table tbody tr")
        .nth(row)
        .locator("mark")
        .evaluate_all(
            "all => all.filter(e => getComputedStyle(e).backgroundColor !== 'rgba(0, 0, 0, 0)').map(e => e.textContent)"
        )
    )


def test_switch_chooses_what_marks_show(marked_page):
    assert get_marked(marked_page, 0) == ["one", "two"] and get_marked(marked_page, 1) == ["four"]
    reason = "In 9 examples, the parts of the gradient could not be measured, and tokens are marked by loss (no rows)."
    assert reason in marked_page.inner_text("#suspects")
    assert "largest parts" in marked_page.inner_text("#marks-meaning")
    by_loss = marked_page.get_by_role("radio", name="Loss")
    assert "least probable" in by_loss.locator("..").get_attribute("title")
    by_loss.focus()
    marked_page.keyboard.press("Space")
    assert "least probable" in marked_page.inner_text("#marks-meaning")
    assert get_marked(marked_page, 0) == ["two", "three"] and get_marked(marked_page, 1) == ["four"]
    assert marked_page.locator("#stage mark").count() == 3  # the selected point is the first row
    marked_page.get_by_role("radio", name="Part of the gradient").check()
    assert get_marked(marked_page, 0) == ["one", "two"]
    assert "largest parts of the example's gradient" in marked_page.inner_text("#reading")
