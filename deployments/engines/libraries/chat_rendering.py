"""Chat templates rendered as transformers renders them, with a bound on what they do. No torch.

A jinja template becomes Python code. Here that code pays from a `StepBudget` for each turn of a loop, each call,
filter, operator and output, so that one that does not end ends with an error, soon.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from jinja2 import TemplateAssertionError, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from deployments.engines.libraries.library_seam import chat_environment
from deployments.engines.libraries.template_steps import CHARACTERS_PER_STEP, StepBudget, TooManySteps
from deployments.engines.records.protocol import EngineError

# A template is compiled at one go, while nothing else runs. The longest in use have half of either.
MAX_SOURCE: Final = 40_000  # characters
MAX_NODES: Final = 5_000  # of its tree
FREE_STEPS: Final = 30_000
STEPS_PER_CHARACTER: Final = 4  # of the messages and tools: a usual template takes one
STEPS_PER_MESSAGE: Final = 200
_NODES_PER_STEP: Final = 16
# Filters without a use in a chat, whose regular expressions or recursion have no known bound, and a text generator.
_LEFT_OUT: Final = ("filesizeformat", "pprint", "striptags", "urlize", "wordwrap", "xmlattr")
_COMPARING_TESTS: Final = (
    "eq", "equalto", "==", "ne", "!=", "gt", "greaterthan", ">", "ge", ">=", "lt", "lessthan", "<", "le", "<=", "in",
    "lower", "upper",
)  # fmt: skip


def render_chat_template(
    source: str,
    name: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, Any],
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> str:
    """Return the text of a chat, up to where the assistant begins to speak. `name` is the template's, for errors.

    `variables` are further ones that the template may know, and go before those that every chat has.

    Raises EngineError when the template refuses the messages, or takes more steps than such a chat may.
    """
    num_characters = _num_characters([messages, tools, dict(variables)])
    num_steps = FREE_STEPS + STEPS_PER_MESSAGE * len(messages) + STEPS_PER_CHARACTER * num_characters
    template = _compiled(source)
    if isinstance(template, str):
        raise EngineError(f"the chat template {name!r} is broken: {template}")
    # As transformers calls it: what is None is not there.
    chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
    shown = {"messages": chat, "tools": list(tools) or None, "documents": None, "add_generation_prompt": True}
    context: Any = template.new_context({**shown, **special_tokens, **variables})
    context.steps = StepBudget(num_steps)
    try:
        return "".join(template.root_render_func(context))
    except TooManySteps:
        why = f"it takes more than {num_steps} steps for these messages, or one that is too large"
        raise EngineError(f"the chat template {name!r} is broken: {why}") from None
    except Exception as error:  # templates are programs of the model's author and may raise anything
        raise EngineError(f"the chat template {name!r} refuses the messages: {error}") from error


def prepare_chat_template(source: str) -> None:
    """Compile a template, which takes too long for an event loop. What is wrong with it, its first chat is told."""
    _compiled(source)


def _num_characters(value: Any) -> int:
    if type(value) is str:
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 1
    return len(value) + sum(map(_num_characters, value))


class _PayingContext(Context):
    """The variables of one rendering, and its steps. The methods are called by the code of templates."""

    steps: StepBudget

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        made: Any = super().derived(locals)
        made.steps = self.steps
        return made

    def pay(self, number: int) -> None:
        self.steps.spend(number)

    def counted(self, values: Iterable[Any], each: int) -> Iterable[Any]:
        return self.steps.counted(values, each)

    def looked_at(self, value: Any) -> Any:
        self.steps.pay_for(value)
        return value

    def copied(self, value: Any) -> Any:
        return self.steps.pay_for_copy(value)

    def joined(self, *values: Any) -> str:
        return "".join([str(self.looked_at(value)) for value in values])


class _PayingGenerator(CodeGenerator):
    """Writes the calls that `_Paying` has put in, of the context's methods and outside of the sandbox."""

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:  # noqa: N802
        if not isinstance(node.node, nodes.EnvironmentAttribute):
            super().visit_Call(node, frame, forward_caller=forward_caller)
            return
        self.write(f"context.{node.node.name}(")
        for argument in node.args:
            self.visit(argument, frame)
            self.write(", ")
        self.write(")")


class _PayingEnvironment(ImmutableSandboxedEnvironment):
    """An environment whose templates pay the steps of their context."""

    code_generator_class = _PayingGenerator
    context_class = _PayingContext
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        num_nodes = sum(1 for _ in source.find_all(nodes.Node))
        if num_nodes > MAX_NODES:
            raise TemplateAssertionError(f"it has {num_nodes} expressions and the like, and may have {MAX_NODES}", 1)
        return super()._generate(_Paying().visit(source), *arguments, **options)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __context.steps.pay_for_call(__obj, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        context.steps.pay_for_operator(operator, left, right)
        return self.binop_table[operator](left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        fill: Any = super().wrap_str_format(value)
        if fill is not None:
            fill.filled_text = value.__self__
        return fill


class _Paying(NodeTransformer):
    """Puts payments into the tree of a template. Raises TemplateAssertionError for what has none."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        if node.recursive:
            raise TemplateAssertionError("recursive loops are not supported", node.lineno)
        node.iter = _call("counted", node.iter, nodes.Const(_cost(node)))
        return node

    def visit_Macro(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        node.body = [nodes.ExprStmt(_call("pay", nodes.Const(_cost(node))), lineno=node.lineno), *node.body]
        return node

    visit_CallBlock = visit_Block = visit_Macro  # noqa: N815  # jinja names them

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("joined", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _call("copied", node.node)
        else:
            node.arg = _looked_at(node.arg)  # it is hashed
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:  # noqa: N802
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if len(sides) == 2 and _is_cheap(node.ops[0].op, *sides):
            return node
        node.expr = _looked_at(node.expr)
        for operand in node.ops:
            operand.expr = _looked_at(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Pair:  # noqa: N802
        self.generic_visit(node)
        node.key = _looked_at(node.key)
        return node

    def visit_ScopedEvalContextModifier(self, node: nodes.Node) -> nodes.Node:  # noqa: N802
        raise TemplateAssertionError("autoescape is not supported", node.lineno)


def _call(name: str, *arguments: nodes.Node) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(arguments), [], None, None)


def _looked_at(expression: nodes.Expr) -> nodes.Expr:
    return expression if isinstance(expression, nodes.Const) else _call("looked_at", expression)


def _is_cheap(operator: str, left: nodes.Expr, right: nodes.Expr) -> bool:
    """Return whether a comparison is as short as the constants in it."""
    if operator in ("eq", "ne"):
        return isinstance(left, nodes.Const) or isinstance(right, nodes.Const)
    are_constants = isinstance(right, nodes.List | nodes.Tuple) and all(isinstance(x, nodes.Const) for x in right.items)
    return operator in ("in", "notin") and are_constants


def _cost(node: nodes.Node) -> int:
    """Return the steps of one passage through a body, without what its values cost."""
    found = list(node.find_all(nodes.Node))
    num_characters = sum(len(one.data) for one in found if isinstance(one, nodes.TemplateData))
    return 1 + len(found) // _NODES_PER_STEP + num_characters // CHARACTERS_PER_STEP


@pass_context
def _pay_for_output(context: _PayingContext, value: Any) -> Any:
    return context.looked_at(value)


def _paying_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    first = _first_argument(function)

    @pass_context
    def pay_and_filter(context: _PayingContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        steps: StepBudget = context.steps
        value = steps.pay_for_filter(name, value, [*args, *kwargs.values()])
        return function(*first(context), value, *args, **kwargs)

    return pay_and_filter


def _paying_test(function: Callable[..., Any]) -> Callable[..., Any]:
    first = _first_argument(function)

    @pass_context
    def pay_and_test(context: _PayingContext, *values: Any) -> Any:
        for value in values:
            context.looked_at(value)
        return function(*first(context), *values)

    return pay_and_test


def _first_argument(function: Callable[..., Any]) -> Callable[[Context], tuple[Any, ...]]:
    """Return a function that makes the arguments which jinja passes to `function` before its value."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", "")
    match wanted:
        case "context":
            return lambda context: (context,)
        case "eval_context":
            return lambda context: (context.eval_ctx,)
        case "environment":
            return lambda context: (context.environment,)
    return lambda context: ()


@functools.cache
def _environment() -> _PayingEnvironment:
    """Return transformers' environment of chat templates, as one that pays."""
    theirs = chat_environment()
    ours = _PayingEnvironment(
        trim_blocks=theirs.trim_blocks,
        lstrip_blocks=theirs.lstrip_blocks,
        extensions=[type(extension) for extension in theirs.extensions.values()],
        finalize=_pay_for_output,
    )
    ours.globals = {name: value for name, value in theirs.globals.items() if name != "lipsum"}
    ours.filters = {name: _paying_filter(name, one) for name, one in theirs.filters.items() if name not in _LEFT_OUT}
    ours.tests = theirs.tests | {name: _paying_test(theirs.tests[name]) for name in _COMPARING_TESTS}
    return ours


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> Template | str:
    """Return the template, or what is wrong with it."""
    if len(source) > MAX_SOURCE:
        return f"it has {len(source)} characters, and may have {MAX_SOURCE}"
    try:
        return _environment().from_string(source)
    except Exception as error:  # of jinja, and of Python for what is nested too deep
        return str(error) or type(error).__name__
