"""The page itself. The only module that imports gradio, which is configured to send nothing anywhere."""

import atexit
import ipaddress
import os
import shutil
import socket
import tempfile
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read by gradio when it is imported
# statistics of all requests for a page that is switched off here: computed anew by every request, and ever slower
os.environ["GRADIO_ANALYTICS_MAX_EVENTS"] = "1"
os.environ["GRADIO_ANALYTICS_CACHE_FREQUENCY"] = str(1 << 31)
os.environ["GRADIO_TEMP_DIR"] = tempfile.mkdtemp(prefix="mvm-page-")  # else in /tmp/gradio, which others may own

import gradio as gr
from gradio.routes import App, ORJSONResponse
from gradio.utils import SyncToAsyncIterator

from mvm.app import show
from mvm.app.edit import EDIT_RANGES, OPTION, PARTS, TASKS, UNSAID, EditForm
from mvm.app.form import ODE, RANGES, SDE, NumberRange, SampleForm, step_solvers
from mvm.app.gate import LOCAL, MOST_OPEN, Gate
from mvm.app.plane import LAWS, PLANE_RANGES, PlaneForm
from mvm.app.service import COMMAND, FAILURES, FIGURES, FILM, PROBLEM, PYTHON, Make, Service, Shelf, Turn, code_part
from mvm.app.walk import REFERENCE_NFE
from mvm.model import Model

atexit.register(shutil.rmtree, os.environ["GRADIO_TEMP_DIR"], ignore_errors=True)
REMEMBERED = 256  # visitors whose page gradio keeps, a third of a MiB each; of more it makes one anew at every step
REQUEST = NumberRange("Number of the request", 0, 1 << 53, 0, 1, "given by the browser", whole=True)
GUIDANCE = ("cfg", "internal", "low", "high")  # fields that a model has values of its own for
CODE: dict[str, Any] = {"wrap_lines": True, "show_line_numbers": False, "interactive": False, "lines": 2}
EVERYWHERE = "0.0.0.0"
UPLOAD = (
    '<label class="mvm-upload"><span>Your picture</span> <input type="file" accept=".png,.jpg,.jpeg,.webp,.bmp">'
    '</label><button type="button" class="mvm-remove" hidden>Remove</button><p class="mvm-sent"></p>'
)
SENDING = """
const [file, remove, said] = ['input', 'button', 'p'].map(one => element.querySelector(one))
const tell = (name, words) => {
  said.textContent = words
  remove.hidden = !name
  props.value = name
}
file.addEventListener('change', async () => {
  if (!file.files.length) return tell('', '')
  said.textContent = 'sending'
  const reply = await fetch('picture', {method: 'POST', body: file.files[0]}).catch(() => null)
  const words = reply ? await reply.text() : 'the picture could not be sent; try again, or give a smaller one'
  tell(reply?.ok ? words : '', reply?.ok ? '' : words)
})
remove.addEventListener('click', () => { file.value = ''; tell('', '') })
"""
Components = dict[str, Any]  # the component that shows a part, by the part's name
Updates = dict[Any, Any]
# every request starts at once: of one visitor's the newest alone goes on (mvm.app.service.Turn)
LIVE: dict[str, Any] = {
    "trigger_mode": "multiple",
    "show_progress": "hidden",
    "preprocess": False,  # values as they come: the forms say in words what is odd, with the field and its range
    "concurrency_limit": None,
    "js": "(...values) => { values[1] = window.mvmAsked = (window.mvmAsked ?? 0) + 1; return values }",
}


class Fields:
    """The fields of a form by name; under those that can be odd, room for a message."""

    def __init__(self, tab: str) -> None:
        self.tab = tab
        self.parts: Components = {}
        self.sliders: Components = {}
        self.problems: Components = {}

    def add(self, name: str, part: Any) -> Any:
        """Add a field; return it."""
        part.elem_id = f"mvm-{self.tab}-{name}"
        self.parts[name] = part
        return part

    def checked(self, name: str, part: Any) -> Any:
        """Add a field with room for a message below; return it."""
        # not in its info line: gradio 6.31 now and then does not draw a changed info
        self.problems[name] = gr.HTML(elem_id=f"mvm-{self.tab}-{name}-problem", elem_classes="mvm-beside")
        return self.add(name, part)

    def choice(self, name: str, choices: list[Any], label: str, info: str, **how: Any) -> Any:
        """Add a list to choose from, its first entry chosen; return it."""
        return self.add(name, gr.Dropdown(choices, **{"value": choices[0], **how}, label=label, info=info))

    def solver(self) -> None:
        self.choice("solver", step_solvers(), "Solver", "heun and euler have no SDE")

    def seed(self, info: str) -> None:
        self.checked("seed", gr.Textbox("0", label="Seed", info=info))

    def typed(self, name: str, bounds: NumberRange) -> Any:
        """Add a number that is typed; return it. Its range is checked by the form, in words, not here."""
        info = f"{bounds.meaning}; {bounds.low:g} to {bounds.high:g}"
        part = gr.Number(bounds.start, label=bounds.label, info=info, step=bounds.step, min_width=110)
        return self.checked(name, part)

    def number(self, name: str, bounds: NumberRange) -> None:
        """Add a number that can be typed, or set by a slider that follows it."""
        low, high = bounds.low, bounds.high
        with gr.Group(elem_classes="mvm-number"):
            typed = self.typed(name, bounds)
            how: dict[str, Any] = {"show_label": False, "container": False, "buttons": [], "elem_classes": "mvm-slider"}
            slider = gr.Slider(low, high, bounds.start, step=bounds.step, label=bounds.label, **how)
        self.sliders[name] = slider
        slider.input(None, slider, typed, js="x => x", show_progress="hidden")
        clamp = f"x => Math.min(Math.max(x ?? {low}, {low}), {high})"
        typed.input(None, typed, slider, js=clamp, show_progress="hidden")

    def guidance(self, model: Model) -> Updates:
        """Return the updates that set a model's own guidance, of fields and sliders."""
        own = own_guidance(model)
        return {group[name]: own[name] for name in GUIDANCE for group in (self.parts, self.sliders) if name in group}

    def messages(self, problems: dict[str, str]) -> Updates:
        """Return the updates that show each problem under its field, and take away those that are solved."""
        return {part: show.problem_html(problems.get(name, "")) for name, part in self.problems.items()}

    def changes(self, but: str = "") -> list[Callable[..., Any]]:
        """Return what happens when a field changes, for all but one of them."""
        return [part.change for name, part in self.parts.items() if name != but]


def _answers(service: Service, fields: Fields, components: Components, kind: type, make: Make) -> dict[str, Any]:
    """Return what binds an event to the making of a form, as gradio takes it."""

    def updates(turn: Turn, number: Any, *values: Any) -> Iterator[Updates]:
        if odd := REQUEST.problem(number):
            yield {components[PROBLEM]: show.problem_html(odd)}
            return
        form = kind(**dict(zip(fields.parts, values, strict=True)))
        wrong = fields.messages(form.problems())
        for parts in service.serve(turn, number, form, make):
            yield {**wrong, **{components[name]: value for name, value in parts.items()}}
            wrong = {}
        # gradio shows the last parts of an answer again when it ends: then they must not cover those of a newer one
        yield {components[PROBLEM]: gr.skip()}

    async def answer(request: gr.Request, *values: Any) -> AsyncIterator[Updates]:
        if not await service.audience.heard(request.session_hash or ""):
            yield {components[PROBLEM]: show.problem_html("nobody listened to this request in time; try again")}
            return
        parts = SyncToAsyncIterator(updates(*values), None)
        try:
            async for update in parts:
                yield update
        finally:
            await parts.aclose()

    inputs = [gr.State(Turn()), gr.Number(0, visible=False), *fields.parts.values()]
    return {"fn": answer, "inputs": inputs, "outputs": [*fields.problems.values(), *components.values()], **LIVE}


def class_choices(model: Model) -> list[tuple[str, int]]:
    """Return names and numbers of the classes."""
    return [(name, number) for number, name in enumerate(model.classes)]


def own_guidance(model: Model) -> dict[str, float]:
    """Return the guidance of a model's own sampler, by field."""
    return {name: getattr(model.recipe.sample, name) for name in GUIDANCE}


def has_inner_head(model: Model) -> bool:
    """Return whether internal guidance can be asked for."""
    return model.recipe.network.inner_block > 0


def _picture_fields(service: Service) -> tuple[Fields, Any, Any]:
    """Add the column of fields; return them, the column of internal guidance, and the button."""
    fields, names = Fields("pictures"), service.shelf.names
    first = service.shelf.get(names[0])
    ranges = RANGES | {name: replace(RANGES[name], start=value) for name, value in own_guidance(first).items()}
    with gr.Column(elem_classes="mvm-controls", min_width=260):
        go = gr.Button("Make pictures", variant="primary", elem_id="mvm-go")
        fields.choice("model", names, "Model", "a run or a shipped one")
        classes = class_choices(first)
        fields.choice("classes", classes, "Classes", "none: all of them in turn", multiselect=True, value=[])
        fields.number("images", RANGES["images"])
        fields.seed("a whole number; picture i has seed + i")
        fields.solver()
        for name in ("nfe", "rho", "cfg"):
            fields.number(name, ranges[name])
        with gr.Column(visible=has_inner_head(first), min_width=110) as inner:
            fields.number("internal", ranges["internal"])
        others = [("none", ""), *((name, name) for name in names)]
        fields.choice("auto", others, "Weaker model", "of the same data, to guide away from", value="")
        fields.number("auto_scale", ranges["auto_scale"])
        with gr.Row():
            for name in ("low", "high"):
                with gr.Column(min_width=110):
                    fields.typed(name, ranges[name])
        info = f"how far the pictures are from a run with {REFERENCE_NFE} evaluations"
        fields.add("reference", gr.Checkbox(False, label="Compare with a long run", info=info))
    return fields, inner, go


def _picture_results() -> Components:
    """Add the column of results; return its components."""
    with gr.Column(elem_classes="mvm-results", min_width=320):
        parts = {PROBLEM: gr.HTML(elem_id="mvm-problem")}
        with gr.Row(elem_classes="mvm-pair"):
            parts |= {side: gr.HTML(elem_id=f"mvm-{side.lower()}", min_width=280) for side in (ODE, SDE)}
        parts[FIGURES] = gr.HTML(elem_id="mvm-figures")
        with gr.Accordion("Make the same pictures again"), gr.Row(elem_classes="mvm-pair"):
            for side in (ODE, SDE):
                with gr.Column(min_width=280):
                    for kind, words, language in ((COMMAND, "command", None), (PYTHON, "Python", "python")):
                        name, label = code_part(side, kind), f"{side}: {words}"
                        parts[name] = gr.Code(label=label, language=language, elem_id=f"mvm-{name}", **CODE)
    return parts


def _pictures_tab(service: Service, blocks: gr.Blocks) -> None:
    """Build the tab of pictures, which makes some as soon as it is opened."""
    with gr.Row(elem_classes="mvm-body"):
        fields, inner, go = _picture_fields(service)
        results = _picture_results()

    model, classes = fields.parts["model"], fields.parts["classes"]

    def model_chosen(name: str) -> Updates:
        try:
            chosen = service.shelf.get(name)
        except FAILURES as error:
            return {classes: gr.update(choices=[], value=[]), results[PROBLEM]: show.problem_html(str(error))}
        updates = {classes: gr.update(choices=class_choices(chosen), value=[]), results[PROBLEM]: ""}
        return {**updates, inner: gr.update(visible=has_inner_head(chosen)), **fields.guidance(chosen)}

    answers = _answers(service, fields, results, SampleForm, service.pictures)
    gr.on([blocks.load, go.click, *fields.changes(but="model")], **answers)
    guided = fields.guidance(service.shelf.get(service.shelf.names[0]))
    changed = [classes, inner, results[PROBLEM], *guided]
    model.change(model_chosen, model, changed, show_progress="hidden").success(**answers)


def _plane_tab(service: Service, tab: gr.Tab) -> None:
    """Build the tab of the plane, which runs when it is first seen."""
    fields = Fields("plane")
    with gr.Row(elem_classes="mvm-body"):
        with gr.Column(elem_classes="mvm-controls", min_width=260):
            go = gr.Button("Run particles", variant="primary", elem_id="mvm-run")
            fields.choice("law", list(LAWS), "Law", "of the data, exact")
            fields.solver()
            for name, bounds in PLANE_RANGES.items():
                fields.number(name, bounds)
            fields.seed("a whole number, of the first particle")
        with gr.Column(elem_classes="mvm-results", min_width=320):
            gr.Markdown(
                "Grey: the exact density at time t. Lines: where the field points, from x towards its guess of the "
                "data. Both sides start from the same noise; the way of twelve particles is drawn."
            )
            results = {name: gr.HTML(elem_id=f"mvm-plane-{name}") for name in (PROBLEM, FILM, FIGURES)}
    gr.on([go.click, tab.select, *fields.changes()], **_answers(service, fields, results, PlaneForm, service.plane))


def _edit_tab(service: Service, tab: gr.Tab) -> None:
    """Build the tab of edits, which makes one when it is first seen."""
    fields, names = Fields("edit"), service.shelf.names
    first = service.shelf.get(names[0])
    classes = class_choices(first)
    columns: Components = {}  # of the field that belongs to a task alone
    ranges = EDIT_RANGES | {"cfg": replace(EDIT_RANGES["cfg"], start=own_guidance(first)["cfg"])}
    with gr.Row(elem_classes="mvm-body"):
        with gr.Column(elem_classes="mvm-controls", min_width=260):
            go = gr.Button("Edit", variant="primary", elem_id="mvm-edit")
            model = fields.choice("model", names, "Model", "a run or a shipped one")
            task = fields.choice("task", list(TASKS), "Task", "what is done with the picture", value="inpaint")
            fields.checked("upload", gr.HTML("", html_template=UPLOAD, js_on_load=SENDING, container=True))
            drawn = fields.choice("drawn", classes, "Else one that the model draws", "its class", value=0)
            said = [("as given", UNSAID), *classes]
            wanted = fields.choice("wanted", said, "Class of the results", "yours has none unless said", value=UNSAID)
            for name in OPTION.values():
                with gr.Column(visible=name == OPTION["inpaint"], min_width=110) as columns[name]:
                    if name == "part":
                        fields.choice(name, list(PARTS), "Part", "to be made anew")
                    else:
                        fields.number(name, EDIT_RANGES[name])
            fields.number("images", EDIT_RANGES["images"])
            fields.seed("a whole number; result i has seed + i")
            for name in ("nfe", "rho", "cfg"):
                fields.number(name, ranges[name])
        with gr.Column(elem_classes="mvm-results", min_width=320):
            gr.Markdown(
                "Your picture stays in the memory of the machine that serves this page, for an hour at most. It is "
                "made as large as the task takes it. What the model has not learned to draw it cannot restore either."
            )
            results: Components = {name: gr.HTML(elem_id=f"mvm-edit-{name}") for name in (PROBLEM, FILM, FIGURES)}
            results[COMMAND] = gr.Code(label="command", elem_id="mvm-edit-command", **CODE)

    def task_chosen(task: str) -> Updates:
        return {column: gr.update(visible=name == OPTION.get(str(task))) for name, column in columns.items()}

    def model_chosen(name: str) -> Updates:
        try:
            chosen = service.shelf.get(name)
        except FAILURES as error:
            return {results[PROBLEM]: show.problem_html(str(error))}
        choices = class_choices(chosen)
        said = gr.update(choices=[("as given", UNSAID), *choices], value=UNSAID)
        first_class = gr.update(choices=choices, value=0)
        return {drawn: first_class, wanted: said, results[PROBLEM]: "", **fields.guidance(chosen)}

    answers = _answers(service, fields, results, EditForm, service.edits)
    gr.on([go.click, tab.select, *fields.changes(but="model")], **answers)
    task.change(task_chosen, task, list(columns.values()), show_progress="hidden")
    changed = [drawn, wanted, results[PROBLEM], *fields.guidance(first)]
    model.change(model_chosen, model, changed, show_progress="hidden").success(**answers)


def build(service: Service) -> gr.Blocks:
    """Return the page, not yet served."""
    with gr.Blocks(title="mvm", analytics_enabled=False) as blocks:
        gr.Markdown(
            "# Mean Velocity Matching\n"
            "One learned field, two ways from the same noise to a picture: the ODE, "
            "and the SDE, which adds noise on the way."
        )
        with gr.Tab("Pictures"):
            _pictures_tab(service, blocks)
        with gr.Tab("Edit a picture") as tab:
            _edit_tab(service, tab)
        with gr.Tab("The field on the plane") as tab:
            _plane_tab(service, tab)
    return blocks


def look_and_feel() -> dict[str, Any]:
    """Return theme and style: fonts of the system, as none may be fetched."""
    fonts: dict[str, Any] = {"font": ("system-ui", "sans-serif"), "font_mono": ("ui-monospace", "monospace")}
    theme = gr.themes.Base(primary_hue="blue", neutral_hue="slate", **fonts)
    css = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    return {"theme": theme.set(block_info_text_color="*neutral_600", block_title_text_color="*neutral_800"), "css": css}


class Guarded(App):
    """gradio's server behind the gate; a middleware would stand inside gradio's own, which answer other pages too."""

    gate: Gate

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.gate(super().__call__, scope, receive, send)


def guard(blocks: gr.Blocks, names: frozenset[str] | None, token: str, service: Service) -> Guarded:
    """Return the server of a page with its gate."""
    queue = blocks._queue  # gradio 6 offers no other way to it

    def forget(visitor: str) -> None:
        queue.pending_messages_per_session.pop(visitor, None)
        for number in queue.pending_event_ids_session.pop(visitor, ()):
            if event := queue.event_ids_to_events.get(number):
                event.alive = False  # as gradio does for those who leave

    def waiting(visitor: str) -> int | None:
        known = visitor in queue.pending_messages_per_session
        return len(queue.pending_event_ids_session.get(visitor, ())) if known else None

    service.audience.forget = forget
    app = Guarded(default_response_class=ORJSONResponse)
    needs = {number: len(function.inputs) for number, function in blocks.fns.items() if function.fn is not None}
    app.gate = Gate(names, token, needs, waiting, service.uploads, service.audience)
    return app


def is_loopback(host: str) -> bool:
    """Return whether an address is this machine's own, which no other machine can reach."""
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def serve(
    shelf: Shelf,
    seats: int,
    host: str,
    port: int | None,
    *,
    token: str = "",
    wait: bool = True,
    inbrowser: bool = False,
) -> tuple[gr.Blocks, str]:
    """Serve the page, without a tunnel to anywhere; return it and its address, at once if not to wait for Ctrl-C.

    token: what visitors must bring along; without one only this machine is listened to.
    """
    if not token and not is_loopback(host):
        raise ValueError(f"--host {host} lets other machines in; add --share-on-network, which asks them for a token")
    service = Service(shelf, seats)
    blocks = build(service)
    blocks.queue(api_open=False)
    names = None if token else frozenset({*LOCAL, host})
    try:
        _, address, _ = blocks.launch(
            _app=guard(blocks, names, token, service),
            server_name=host,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            show_error=True,
            ssr_mode=False,
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            mcp_server=False,
            num_workers=0,
            max_threads=MOST_OPEN,  # so many may wait to be heard; gradio's 40 could all be of silent visitors
            state_session_capacity=max(REMEMBERED, 2 * seats),
            **look_and_feel(),
        )
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: cannot listen there ({error}); give another port") from None
    if token:
        address = f"http://{host if host != EVERYWHERE else socket.gethostname()}:{blocks.server_port}/?token={token}"
    if inbrowser:
        webbrowser.open(address)
    if wait:
        print(f"mvm: the page is at {address}; Ctrl-C ends it", flush=True)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
        blocks.close(verbose=False)
    return blocks, address
