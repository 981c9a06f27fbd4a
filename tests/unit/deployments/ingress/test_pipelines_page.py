"""The page Pipelines in a real browser, over a pipeline that is given: it fits, and says which stage has failed."""

from __future__ import annotations

import json
from typing import Any

from kit.browser import OpenPage, axe_violations, needs_axe
from unit.deployments.ingress.page_server import PageServer

NAMES = ("tokens", "answer", "digit", "image", "text-embedding", "similarity")


def pipeline() -> dict[str, Any]:
    stages = [
        {
            "name": name,
            "kind": "model",
            "target": f"a-model-for-{name}",
            "needs": [NAMES[number - 1] if number else "prompt"],
            "inputs": {},
        }
        for number, name in enumerate(NAMES)
    ]
    inputs = [{"name": "prompt", "type": "text", "optional": False}]
    outputs = {"score": f"${NAMES[-1]}"}
    return {"id": "sum", "description": "", "inputs": inputs, "stages": stages, "outputs": outputs, "problem": None}


def event(**data: Any) -> str:
    return f"data: {json.dumps(data)}\n\n"


@needs_axe
def test_six_stages_fit_and_those_after_a_failure_say_so(page_server: PageServer, open_page: OpenPage) -> None:
    page = open_page(page_server.url, bypass_csp=True)
    page.route("**/v1/pipelines", lambda route: route.fulfill(json={"pipelines": [pipeline()]}))
    stages = [("tokens", "running", None), ("tokens", "done", 2.0), ("answer", "running", None)]
    told = [event(type="pipeline.stage", stage=name, state=state, ms=ms) for name, state, ms in stages]
    failed = f"event: error\n{event(error={'message': 'the model is gone'})}"
    page.route(
        "**/v1/pipelines/sum/runs",
        lambda route: route.fulfill(body="".join([*told, failed]), content_type="text/event-stream"),
    )
    page.goto(f"{page_server.url}/pipelines")
    page.get_by_label("prompt").fill("3 + 4")
    page.get_by_role("button", name="Run").click()
    page.get_by_role("alert").get_by_text("the model is gone").wait_for()
    states = page.locator("table tbody tr td:nth-child(4)").all_inner_texts()
    assert states == ["done", "failed", *["not run"] * 4]
    assert axe_violations(page) == []
    for width in (360, 3840, 1280):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    graph = page.get_by_role("region", name="Graph of sum")
    assert graph.evaluate("one => one.scrollWidth <= one.clientWidth"), "at 1,280 px the graph is whole"
