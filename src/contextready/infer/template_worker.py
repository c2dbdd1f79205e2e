"""Renders one chat template in a process of its own, with limited memory and time: `python -m` runs this file.

A template is a program, and those of strangers may loop or fill the memory. Requests and answers are lines of JSON on
standard input and output. The first request names the template, and every other one is a set of variables.
"""

import json
import resource
import sys
from datetime import datetime
from typing import Any

MEMORY = 1 << 30
"""Bytes of address space; real templates need some hundred thousand."""
SECONDS = 60
"""Of computation per request, in case that nobody is left to end this process."""
LARGEST = 16 << 20
"""Characters of the longest text."""
LONGEST_MESSAGE = 300


def environment() -> Any:
    """Return the environment in which transformers renders chat templates."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks the answers for training; here it only shows what it contains."""

        tags = {"generation"}  # noqa: RUF012  (jinja's own declaration)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


def _answer(template: Any, variables: dict[str, Any]) -> dict[str, str]:
    try:
        text = template.render(**variables)
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # templates raise anything
        return {"error": _one_line(error)}
    return {"text": text} if len(text) <= LARGEST else {"error": f"it writes more than {LARGEST:,} characters"}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:LONGEST_MESSAGE].rstrip(".") or type(error).__name__


def _limit_time() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    seconds = int(used.ru_utime + used.ru_stime) + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds if hard < 0 else min(seconds, hard), hard))


def main() -> None:
    """Answer requests until standard input ends."""
    made = environment()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY if hard < 0 else min(MEMORY, hard), hard))
    template: Any = None
    for line in sys.stdin:
        _limit_time()
        request = json.loads(line)
        if template is None:
            try:
                template, answer = made.from_string(request), {"text": ""}
            except Exception as error:
                answer = {"error": _one_line(error)}
        else:
            answer = _answer(template, request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
