"""The web page in a real browser, in front of a real export."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest

import ziggurat as zg
from tests.serving.server.browser import CHROMIUM, Page, browser
from ziggurat.serving.server.app import ServerApp
from ziggurat.serving.server.config import ServerConfig
from ziggurat.serving.server.connections import DrainingServer, uvicorn_config
from ziggurat.serving.server.serve import address_of, bind

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"),
]
ITEMS = "document.querySelectorAll('#items > li').length"
SETTLED = "document.getElementById('status')?.innerText.includes(' items in ')"


class _Served(threading.Thread):
    """An app on a port of its own, in a thread with an event loop."""

    def __init__(self, app: ServerApp, config: ServerConfig) -> None:
        super().__init__(daemon=True)
        self.listener: socket.socket = bind("127.0.0.1", 0)
        self.address = address_of(self.listener)
        settings = uvicorn_config(app, config=config, metrics=app.metrics)
        self.server = DrainingServer(settings, limits=config, listener=self.listener)

    def run(self) -> None:
        asyncio.run(self.server.serve())


@pytest.fixture(scope="module")
def address(loaded: zg.Recommender) -> Iterator[str]:
    config = ServerConfig(deadline_ms=5000, degrade=False, linger_s=0.1, max_k=30)
    served = _Served(ServerApp(answerer=loaded, config=config), config)
    served.start()
    yield served.address
    served.server.should_exit = True
    served.join(timeout=20)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


@pytest.fixture
def page(tab: Page, address: str) -> Page:
    tab.resize(width=1280, height=900)
    tab.open("about:blank")
    tab.open(address)
    tab.wait(SETTLED)
    tab.problems.clear()
    return tab


def test_a_user_is_picked_and_answered(page: Page, loaded: zg.Recommender) -> None:
    assert page.run(ITEMS) == 10, "the page asks for the most active user by itself"
    user = loaded.users()[3]
    page.fill(user=user, k="4", filter="tags:t1", seen=False, explain=True)
    page.click("#ask button")
    page.wait(f"{ITEMS} === 4 && {SETTLED}")
    expected = loaded.recommend({"user_id": user}, k=4, filter="tags:t1", exclude_seen=False)
    assert page.run("[...document.querySelectorAll('#items > li')].map((line) => line.dataset.id)") == [
        item.id for item in expected.items
    ]
    line = page.text("#items > li")
    assert "Item number" in line, "the title of an item is its name"
    assert expected.items[0].id in line
    assert "like" in line, "the score of each task"
    assert f"{expected.items[0].tasks['like']:.3f}"[:4] in line
    assert "retrieval" in line
    assert page.text("#plan"), "how the items were found"
    history = loaded.history({"user_id": user}, limit=50)
    page.wait(f"document.querySelectorAll('#history > li').length === {len(history)}")
    page.click("#items button")
    page.wait("document.querySelector('#items .reason')?.innerText.includes('passes')")
    assert page.problems == []


def test_it_says_why_an_item_is_not_there(page: Page, loaded: zg.Recommender) -> None:
    had = loaded.history({"user_id": loaded.users()[0]}, limit=1)[0]
    page.fill(item=had)
    page.click("#why button")
    page.wait("document.getElementById('explanation').innerText.includes('the user has had it')")
    page.fill(item="nothing of this id")
    page.click("#why button")
    page.wait("!document.getElementById('error').hidden")
    assert "ids of items in the catalogue" in page.text("#error")


def test_errors_are_readable(page: Page) -> None:
    page.fill(filter="genre:(")
    page.click("#ask button")
    page.wait("!document.getElementById('error').hidden")
    error = page.text("#error")
    assert all(part in error for part in ("This cannot be answered", "expected", "found", "where", "ways out"))
    page.fill(filter="", columns="{")
    page.click("#ask button")
    page.wait("document.getElementById('error').innerText.includes('The columns are no JSON')")
    page.fill(columns="", filter="price:>1e9")
    page.click("#ask button")
    page.wait("!document.getElementById('no-items').hidden && document.getElementById('error').hidden")
    assert page.run(ITEMS) == 0


@pytest.mark.parametrize("width", [1280, 700, 320])
@pytest.mark.parametrize("dark", [False, True])
def test_nothing_is_cut_off_and_all_can_be_read(page: Page, width: int, dark: bool) -> None:
    page.resize(width=width, height=800, dark=dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run(_MIN_CONTRAST) >= 4.5, "of text on its ground, by the guidelines for accessible content (AA)"


_MIN_CONTRAST = """(() => {
  const light = (text) => {
    const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((part) => {
      const value = part / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const color = getComputedStyle(each).backgroundColor;
      if (color !== "rgba(0, 0, 0, 0)") return color;
    }
    return "rgb(255, 255, 255)";
  };
  let least = 21;
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.offsetParent || ["SCRIPT", "OPTION", "NOSCRIPT"].includes(element.tagName)) continue;
    const pair = [light(getComputedStyle(element).color), light(ground(element))].sort((a, b) => b - a);
    least = Math.min(least, (pair[0] + 0.05) / (pair[1] + 0.05));
  }
  return least;
})()"""
