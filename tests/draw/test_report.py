import json
from html.parser import HTMLParser

from stretto.draw.report import report, write_report

STEADY = {"grad_norm": 1.0, "lr": 3e-3, "seconds": 0.1, "data_seconds": 0.0, "tokens_per_second": 1e4, "peak_bytes": 3e8}
ROWS = [{"step": step, "loss": 5.5 - step / 10, **STEADY} for step in range(1, 31)]


class Page(HTMLParser):
    """What is open at the end, and every tag and text that was seen."""

    def __init__(self, text):
        super().__init__()
        self.open, self.seen, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_asks_for_nothing_else():
    page = Page(report("tiny", [*ROWS, {"step": 30, "eval_loss": 2.4}], "steps = 30", {"status": "done"}, {"python": "3.11"}))
    assert page.open == []
    assert not [attributes for _, attributes in page.seen if {"src", "href"} & set(attributes)]
    assert "http" not in "".join(page.text).replace("http://www.w3.org/2000/svg", "")
    assert sum(tag == "svg" for tag, _ in page.seen) == 7


def test_it_shows_the_numbers_the_texts_and_the_job():
    texts = {"before": "x<q", "after": "The import statement"}
    status = {"status": "done", "entropy": 2.45, "final_loss": 2.06, "peak_bytes": [3.1e8, 2.9e8], "texts": texts}
    text = "".join(Page(report("tiny", ROWS, '[batch]\nsize = 12 # "rows"', status, {})).text)
    for words in ("2.06", "bigram entropy 2.45", "310 MB", "x<q", "The import statement", 'size = 12 # "rows"', "before training"):
        assert words in text


def test_a_run_that_failed_before_its_first_step_has_a_page():
    page = Page(report("tiny", [], "", {"status": "failed", "why": "rank 1 failed <here>"}, {}))
    assert page.open == [] and "rank 1 failed <here>" in "".join(page.text)


def test_a_run_folder_gets_its_page_from_its_own_files(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "job.toml").write_text("steps = 30\n")
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html" and "steps = 30" in path.read_text()
