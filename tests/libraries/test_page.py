"""The page in a real Chromium: every control, the keyboard alone, widths, colours, what it must not do."""

import functools
import http.server
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from served import TINY, Server, served
from trainfit.spec.errors import InputError
from trainfit.web.limits import recipe_of

pytestmark = pytest.mark.processes
NAMES = ("chromium", "chromium-browser", "google-chrome")
OPENED = "#model=tiny-llama-demo&batch.micro=2&batch.seq=64&hardware.gpu=h100-sxm"
TRACED_MS = 60_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("page")) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, NAMES)), None)
    assert program is not None, f"no browser: install one of {', '.join(NAMES)}"
    with sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield made
        made.close()


@contextmanager
def opened(browser: Browser, address: str, *, ready: str = ".verdict.good", **context: Any) -> Iterator[Page]:
    """Open the page; at the end no script has failed, and nothing was asked of another host."""
    made = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **context})
    page = made.new_page()
    problems: list[str] = []
    hosts: set[str] = set()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    page.on("request", lambda request: hosts.add(urlparse(request.url).netloc))
    page.goto(address)
    page.wait_for_selector(ready, timeout=TRACED_MS)
    yield page
    made.close()
    # A question that is refused is a reply of 422, which the browser logs.
    assert [one for one in problems if "status of 422" not in one] == []
    assert hosts == {urlparse(address).netloc}


def settled(page: Page) -> None:
    """Wait until nothing is asked any more."""
    page.wait_for_timeout(250)
    page.wait_for_selector(".spinner", state="detached", timeout=TRACED_MS)


def verdict(page: Page) -> str:
    return page.inner_text(".verdict")


def test_the_first_screen_answers_at_once(browser: Browser, server: Server) -> None:
    with opened(browser, f"{server.address}/") as page:
        settled(page)
        assert verdict(page) == "Fits"
        assert "llama-3.1-8b" in page.inner_text(".subject")
        box = page.locator(".figures").bounding_box()
        assert box is not None
        assert box["y"] + box["height"] < 900
        assert "Fits: llama-3.1-8b" in page.title()
    with opened(browser, f"{server.address}/") as page:
        taken = page.evaluate("performance.now()")
        assert taken < 4000, taken  # With the browser's start of the page, on a busy machine.


@pytest.mark.parametrize("width", [390, 768, 1280, 1920])
@pytest.mark.parametrize("colors", ["light", "dark"])
def test_widths_and_colors(browser: Browser, server: Server, width: int, colors: Any) -> None:
    """Nothing is cut off, and axe finds nothing that a screen reader or weak eyes would miss."""
    size = {"width": width, "height": 844 if width < 500 else 900}
    with opened(browser, f"{server.address}/{OPENED}", viewport=size, color_scheme=colors) as page:
        settled(page)
        page.click("summary:has-text('All fields')")
        for view in ("fit", "plan", "gpus", "ultrascale", "oom"):
            page.click(f"#tab-{view}")
            page.wait_for_timeout(150)
            if view == "oom":
                page.click("text=Show an example")
                page.wait_for_selector(".legend")
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide <= width, (view, wide)
            found = Axe().run(page, options={"runOnly": ["wcag2a", "wcag2aa", "best-practice"]})
            bad = [(one["id"], one["nodes"][0]["html"][:200]) for one in found.response["violations"]]
            assert bad == [], (view, bad)


def test_every_control_sets_its_field(browser: Browser, server: Server) -> None:
    """Each control, given another value, sends a recipe with that value, which is read or refused."""
    with opened(browser, f"{server.address}/{OPENED}") as page:
        settled(page)
        answer = json.dumps({"answer": server.ask("predict", {"recipe": TINY}).answer})
        course = json.dumps({"answer": server.ask("course", {"recipe": TINY}).answer})
        asked: list[dict[str, Any]] = []

        def reply(route: Route) -> None:
            kind = route.request.url.rpartition("/")[2]
            if kind == "predict":
                asked.append(json.loads(route.request.post_data or "{}")["recipe"])
            route.fulfill(body=answer if kind == "predict" else course, content_type="application/json")

        page.route(re.compile("/api/(predict|course|advice)$"), reply)
        page.click("summary:has-text('All fields')")
        tried, refused = _operated(page, asked)
        schema = server.request("GET", "/api/page").data["schema"]
    assert set(schema["properties"]) - {path.partition(".")[0] for path in tried} == set()
    assert len(tried) > 90, tried
    # Most values go alone; others contradict the rest of the recipe, which the refusal names.
    assert len(refused) < len(tried) / 2, refused


def _operated(page: Page, asked: list[dict[str, Any]]) -> tuple[set[str], dict[str, str]]:
    """Give every control another value, each from one recipe; return the fields, and those refused."""
    tried: set[str] = set()
    refused: dict[str, str] = {}
    start = page.evaluate("location.hash")
    # Choices that show more fields.
    variants = ["", "&adapter.kind=lora",
                "&adapter.kind=lora&quantize=%7B%22kind%22:%22nf4%22,%22block%22:128%7D",
                "&objective.name=grpo", "&recompute=%7B%22every%22:2%7D", "&recompute=%7B%22budget%22:0.5%7D",
                "&recompute=%7B%22budget_gib%22:60%7D", "&recompute=%7B%22layers%22:[%22full%22]%7D",
                "&recompute=%7B%22selective%22:%7B%22save%22:[%22mm%22]%7D%7D"]  # fmt: skip
    for variant in variants:
        page.evaluate("hash => { location.hash = hash; }", start + variant)
        page.wait_for_timeout(60)
        for details in page.query_selector_all(".every details"):
            details.evaluate("one => { one.open = true; }")
        paths = page.eval_on_selector_all(".every .field", "rows => rows.map(row => row.dataset.path)")
        for path in [one for one in paths if one not in tried]:
            page.evaluate("hash => { location.hash = hash; }", start + variant)
            page.wait_for_timeout(20)
            for details in page.query_selector_all(".every details"):
                details.evaluate("one => { one.open = true; }")
            row = page.locator(f".every .field[data-path='{path}']").last
            control = row.locator("select, input").first
            before = len(asked)
            _change(control)
            for _ in range(100):  # A loaded machine takes longer than 20 ms.
                page.wait_for_timeout(20)
                if len(asked) > before:
                    break
            assert len(asked) > before, f"{path}: its control asks nothing"
            assert page.evaluate("location.hash") != start + variant, path
            tried.add(path)
            try:
                recipe_of(asked[-1])
            except InputError as error:
                refused[path] = str(error)
    return tried, refused


def _change(control: Any) -> None:
    """Give a control another value by its own means."""
    tag = control.evaluate("one => one.tagName")
    if tag == "SELECT":
        values = control.evaluate("one => [...one.options].map(each => each.value)")
        now = control.input_value()
        control.select_option(next(one for one in values if one != now))
    elif control.get_attribute("type") == "checkbox":
        control.set_checked(not control.is_checked())
    else:
        now = control.input_value()
        mode = control.get_attribute("inputmode")
        text = (
            ("3" if now != "3" else "4") if mode == "numeric" else "0.25" if mode == "decimal" else "chatml"
        )
        control.fill('{"seed": 3}' if control.get_attribute("placeholder") == "JSON" else text)
        control.press("Enter")
        control.blur()


def test_a_field_is_edited_and_the_next_one_clicked(browser: Browser, server: Server) -> None:
    """A change draws no other control anew: the click that ends it reaches the control under the pointer."""
    with opened(browser, f"{server.address}/{OPENED}") as page:
        settled(page)
        page.click("summary:has-text('All fields')")
        page.click("[data-section=batch] > summary")
        page.click(".main-fields [data-path='batch.micro'] input")
        page.keyboard.press("End")
        page.keyboard.press("Backspace")
        page.keyboard.type("3")
        page.click(".main-fields [data-path='batch.seq'] input")
        path = "document.activeElement.closest('[data-path]').dataset.path"
        assert page.evaluate(path) == "batch.seq"
        assert page.input_value("[data-section=batch] [data-path='batch.micro'] input") == "3"
        assert page.inner_text("[data-count=batch]") == "2 set"
        page.fill("[data-section=batch] [data-path='batch.accumulate'] input", "2")
        page.click("#model")
        assert page.evaluate("document.activeElement.id") == "model"
        assert page.input_value(".main-fields [data-path='batch.accumulate'] input") == "2"
        settled(page)
        assert "3 x 64 x 2" in page.inner_text(".subject")


def test_a_refused_value_is_named_at_its_control(browser: Browser, server: Server) -> None:
    with opened(browser, f"{server.address}/{OPENED}") as page:
        page.fill("[data-path='hardware.count'] input >> nth=0", "3")
        page.keyboard.press("Tab")
        page.select_option("#trained", "full")
        page.evaluate("() => { location.hash += '&parallel.tensor=2'; }")
        page.wait_for_selector(".verdict.refused")
        assert "hardware.count" in page.inner_text(".why")
        assert "make the two equal" in page.inner_text(".main-fields [data-path='hardware.count'] .problem")
        page.fill("#model", "no-such-model")
        page.keyboard.press("Tab")
        expect(page.locator("#model-problem")).to_contain_text("no model of that name")
        assert page.get_attribute("#model", "aria-invalid") == "true"


def test_the_keyboard_alone(browser: Browser, server: Server) -> None:
    """From the address bar: skip link, tabs, controls, timeline, comparing; the focus is always visible."""
    with opened(browser, f"{server.address}/{OPENED}") as page:
        settled(page)
        press = page.keyboard.press
        press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the answer"
        press("Tab")
        assert page.evaluate("document.activeElement.id") == "tab-fit"
        for name in ("plan", "gpus", "ultrascale", "oom"):
            press("ArrowRight")
            assert page.evaluate("document.activeElement.id") == f"tab-{name}"
            assert page.get_attribute(f"#tab-{name}", "aria-selected") == "true"
        press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == "tab-fit"
        seen: list[str] = []
        for _ in range(60):
            press("Tab")
            at = page.evaluate(
                """() => { const one = document.activeElement; const style = getComputedStyle(one);
                return [one.id || one.getAttribute('aria-label') || one.textContent.trim().slice(0, 30),
                        style.outlineStyle !== 'none' || one.tagName === 'BODY']; }"""
            )
            if at[0] in seen and at[0] == "tab-fit":
                break
            seen.append(at[0])
            assert at[1], f"no visible focus on {at[0]}"
        for name in (
            "share",
            "theme",
            "paste",
            "model",
            "trained",
            "compare",
            "tokens",
            "Moment of the step",
            "Copy command",
            "Copy recipe",
        ):
            assert name in seen, (name, seen)
        gpu = page.locator(".main-fields [data-path='hardware.gpu'] select")
        gpu.focus()
        press("ArrowDown")
        settled(page)
        assert "h100-pcie" in page.inner_text(".subject")
        assert page.evaluate("document.activeElement.closest('[data-path]').dataset.path") == "hardware.gpu"
        seq = page.locator(".main-fields [data-path='batch.seq'] input")
        seq.focus()
        press("ArrowUp")
        settled(page)
        assert seq.input_value() == "128"
        assert "2 x 128" in page.inner_text(".subject")
        page.locator("[role=slider]").focus()
        before = page.get_attribute("[role=slider]", "aria-valuetext")
        press("Home")
        press("ArrowRight")
        after = page.get_attribute("[role=slider]", "aria-valuetext")
        assert before != after
        assert "forward" in (after or "")
        page.locator("#compare").focus()
        press("Enter")
        page.wait_for_selector(".compare")
        assert page.get_attribute(".slots button >> nth=1", "aria-pressed") == "true"


def test_up_to_four_recipes_and_a_shared_address(browser: Browser, server: Server) -> None:
    with opened(browser, f"{server.address}/{OPENED}") as page:
        for number, seq in enumerate(("128", "256", "512"), 2):
            page.click("#compare")
            page.fill(".main-fields [data-path='batch.seq'] input", seq)
            page.keyboard.press("Tab")
            assert page.locator(".compare tbody tr").count() == number
        assert page.locator("#compare").count() == 0
        settled(page)
        rows = page.locator(".compare tbody tr").all_inner_texts()
        assert ["batch.seq: 128" in rows[1], "batch.seq: 512" in rows[3]] == [True, True]
        assert page.locator(".compare .bar").count() == 4
        address = page.evaluate("location.href")
        speeds = [row.split("\t")[-4] for row in rows]
    with opened(browser, address) as page:
        settled(page)
        again = page.locator(".compare tbody tr").all_inner_texts()
        assert [row.split("\t")[-4] for row in again] == speeds
        page.click("[aria-label='Edit recipe B']")
        assert page.input_value(".main-fields [data-path='batch.seq'] input") == "128"
        page.click("[aria-label='Remove recipe B']")
        assert page.locator(".compare tbody tr").count() == 3


def test_copies(browser: Browser, server: Server) -> None:
    with opened(
        browser, f"{server.address}/{OPENED}", permissions=["clipboard-read", "clipboard-write"]
    ) as page:
        settled(page)

        def copied(button: str) -> str:
            page.click(button)
            page.wait_for_timeout(100)
            return page.evaluate("navigator.clipboard.readText()")

        assert (
            copied("text=Copy command")
            == "trainfit predict tiny-llama-demo --batch 2 --seq 64 --gpu h100-sxm"
        )
        assert copied("text=Copy recipe").startswith("model:\n  config: tiny-llama-demo\n")
        assert copied("#share") == page.evaluate("location.href")


def test_what_would_fit_is_taken(browser: Browser, server: Server) -> None:
    address = f"{server.address}/#model=smollm-135m&batch.micro=32&batch.seq=2048&hardware.gpu=rtx-4090"
    with opened(browser, address, ready=".verdict.bad") as page:
        page.wait_for_selector(".advice button", timeout=2 * TRACED_MS)
        page.click(".advice button >> nth=0")
        page.wait_for_selector(".verdict.good", timeout=TRACED_MS)
        assert page.evaluate("document.activeElement.id") == "answer"


def test_the_fastest_recipe_and_its_frontier(browser: Browser, server: Server) -> None:
    kept = ["compile", "attention", "loss", "block_kernels", "optimizer.name"]
    values = "&compile=false&attention=sdpa&loss=standard&block_kernels=standard&optimizer.name=adamw"
    with opened(browser, f"{server.address}/{OPENED}{values};?view=plan", ready=".search") as page:
        for name in kept:
            page.check(f"[id='keep-{name}']")
        page.fill("#memory", "2")
        page.check("#keep-quality")
        page.click("text=Find the fastest")
        page.wait_for_selector("text=Take it", timeout=3 * TRACED_MS)
        assert page.locator(".dot").count() >= 2
        assert page.locator(".dot.best").count() == 1
        page.locator(".dot.best").focus()
        page.keyboard.press("Enter")
        page.wait_for_selector(".verdict.good", timeout=TRACED_MS)
        assert page.get_attribute("#tab-fit", "aria-selected") == "true"


def test_cost_by_gpu_ends_when_the_view_is_left(browser: Browser, server: Server) -> None:
    with opened(browser, f"{server.address}/{OPENED}") as page:
        page.click("#tab-gpus")
        page.wait_for_selector(".gpus tbody tr >> nth=2", timeout=TRACED_MS)
        costs = [
            float(text.strip("$()"))
            for text in page.locator(".gpus tr[data-fits=true] td:nth-child(3)").all_inner_texts()
            if "$" in text
        ]
        assert costs == sorted(costs)
        page.click("#tab-oom")
        assert _ends(server)


def test_ultrascale_numbers(browser: Browser, server: Server) -> None:
    """The published example: 2.09 and 2.15 TiB, which the page calls TB."""
    with opened(browser, f"{server.address}/{OPENED};?view=ultrascale", ready=".widget") as page:
        page.select_option("#u-preset", "")
        page.click("#u-mixed")
        for name, value in {
            "a": 32,
            "b": 100,
            "h": 4096,
            "h_ff": 16384,
            "layers": 32,
            "s": 1024,
            "v": 32000,
            "k": 2,
            "t": 1,
            "d": 1,
        }.items():
            page.fill(f"#u-{name}", str(value))
            page.keyboard.press("Tab")
        page.select_option("#u-ff_activation", label="swiglu")
        expect(page.locator(".numbers tr:has-text('activations') td >> nth=0")).to_have_text(
            "2.09 TiB", timeout=TRACED_MS
        )
        assert page.inner_text(".numbers tr.sum td >> nth=0") == "2.15 TiB"
        page.wait_for_selector(".numbers tr.sum td:nth-child(3):has-text('iB')", timeout=TRACED_MS)
        assert "attention scores" in page.inner_text(".notes")


def test_an_error_is_explained(browser: Browser, server: Server) -> None:
    with opened(browser, f"{server.address}/{OPENED};?view=oom", ready="#oom-text") as page:
        page.fill("#oom-text", "nothing of the kind")
        page.click("text=Explain >> nth=-1")
        expect(page.locator(".why.bad")).to_contain_text("no OutOfMemoryError")
        page.click("text=Show an example")
        expect(page.locator(".notes")).to_contain_text("expandable_segments")
        assert "71.02 GiB" in page.inner_text(".budget")


def test_a_pasted_config_is_text_and_never_markup(browser: Browser, server: Server) -> None:
    with opened(browser, f"{server.address}/{OPENED}") as page:
        page.click("#paste")
        page.fill("#pasted", "not: [a recipe")
        page.click("text=Use it")
        expect(page.locator("dialog .problem")).to_contain_text("not YAML")
        row = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
               "num_attention_heads": 4, "vocab_size": 256,
               "_name_or_path": "<img src=x onerror=alert(1)>"}  # fmt: skip
        page.fill("#pasted", json.dumps(row))
        page.click("text=Use it")
        expect(page.locator(".subject")).to_contain_text("<img", timeout=TRACED_MS)
        assert page.locator("main img").count() == 0
        assert page.input_value("#model") == "<img src=x onerror=alert(1)>"
        page.click("#paste")
        page.select_option("#shipped", "gpt2-h100")
        expect(page.locator(".subject")).to_contain_text("gpt2", timeout=TRACED_MS)


def test_a_hostile_address_is_no_more_than_a_recipe(browser: Browser, server: Server) -> None:
    hashes = ("#__proto__.x=1&model=gpt2", "#model=%3Cscript%3Ealert(1)%3C/script%3E", "#a=b;;;?view=nothing",
              "#model.config=%7B%22hidden_size%22:-1%7D", "#batch.seq=%22x%22&model=gpt2",
              "#" + "x=" + "y" * 5000)  # fmt: skip
    for text in hashes:
        with opened(browser, f"{server.address}/{text}", ready=".verdict") as page:
            settled(page)
            assert page.evaluate("({}).x === undefined && !document.querySelector('main script')")


def test_a_loop_and_a_pipeline_have_their_tables(browser: Browser, server: Server) -> None:
    fields = "objective.name=grpo&objective.max_prompt=32&objective.max_new=32"
    fields += "&objective.group=4&objective.prompts=2&batch.accumulate=4"
    fields += "&model.implementation=native&adapter.kind=lora"
    with opened(browser, f"{server.address}/{OPENED}&{fields}") as page:
        settled(page)
        assert {"rollout", "update"} <= set(
            page.locator("[aria-label='Memory of the loop by phase'] th").all_inner_texts()
        )
        assert page.locator("[aria-label='Time of the loop by part'] tbody tr").count() >= 4
    with opened(browser, f"{server.address}/{OPENED}&hardware.count=2&parallel.pipeline=2") as page:
        settled(page)
        assert page.locator('[aria-label="The pipeline\'s GPUs"] tbody tr').count() == 2
        assert "send" in page.inner_text("[aria-label='Collectives of a step']")


def test_colors_are_kept(browser: Browser, server: Server) -> None:
    with opened(browser, f"{server.address}/{OPENED}", color_scheme="light") as page:
        paper = "getComputedStyle(document.documentElement).backgroundColor"
        light = page.evaluate(paper)
        page.select_option("#theme", "dark")
        assert page.evaluate(paper) != light
        page.reload()
        page.wait_for_selector(".verdict")
        assert page.input_value("#theme") == "dark"
        assert page.evaluate(paper) != light


def test_closing_the_page_ends_its_trace(browser: Browser, server: Server) -> None:
    fields = "model=llama-3.1-70b&batch.seq=8192&hardware.gpu=h100-sxm&hardware.count=8&recompute=fit"
    address = f"{server.address}/#{fields}"
    with opened(browser, address, ready=".spinner") as page:
        for _ in range(100):
            if server.tracers():
                break
            page.wait_for_timeout(100)
        assert server.tracers()
        page.close()
    assert _ends(server)


def _ends(server: Server) -> bool:
    """Return whether nothing is traced any more within a few seconds."""
    for _ in range(60):
        if not server.tracers():
            return True
        threading.Event().wait(0.1)
    return False


def test_the_static_page(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainfit.web.export import Choices, export_page

    monkeypatch.setenv("TRAINFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("trainfit.web.export._widgets", lambda: {})
    site = tmp_path / "site"
    choices = Choices(
        ["tiny-llama-demo"], ["h100-sxm", "t4"], seqs=(64, 128), trained=("full", "lora"), recompute=("none",)
    )
    assert export_page(site, choices) == 8
    handler = functools.partial(_Quiet, directory=os.fspath(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        with opened(browser, f"http://127.0.0.1:{httpd.server_address[1]}/") as page:
            page.select_option("#axis-4", label="128")
            expect(page.locator(".subject")).to_contain_text("1 x 128")
            page.select_option("#axis-5", label="LoRA")
            expect(page.locator(".subject")).to_contain_text("lora")
            address = page.evaluate("location.href")
            page.click("#compare")
            page.select_option("#axis-1", label="T4")
            settled(page)
            assert page.locator(".compare .bar").count() == 2
            page.click("#tab-gpus")
            page.wait_for_selector(".gpus tbody tr >> nth=1")
            for view in ("plan", "ultrascale", "oom"):
                page.click(f"#tab-{view}")
        with opened(browser, address) as page:
            assert "1 x 128" in page.inner_text(".subject")
        httpd.shutdown()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""
