"""Published calculators in comparable form, and their numbers next to the virtual GPU's.

``ultrascale.memory(spec)`` is the Ultrascale Playbook's widget, ``rules`` holds the rules of thumb, and
``compare.compare(recipe, estimate)`` compares each with ours; ``python -m benchmarks.calculators`` prints the
table of docs/reference/calculators.md.
"""
