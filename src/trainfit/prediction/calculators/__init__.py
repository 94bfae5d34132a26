"""Published calculators in compatible form, and what they say beside the virtual GPU.

``ultrascale.memory(spec)`` is the Ultrascale Playbook's widget, ``rules`` holds the rules of thumb, and
``compare.compare(recipe, estimate)`` sets each beside ours. ``python -m trainfit.prediction.calculators`` prints the table
of docs/reference/calculators.md.
"""
