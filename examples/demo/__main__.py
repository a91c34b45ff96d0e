"""`python -m examples.demo` runs the demo."""

from examples.demo import demo

demo(prog_name="python -m examples.demo")
