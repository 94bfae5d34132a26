"""Published calculators: ``ultrascale`` is the Ultrascale Playbook's widget, ``rules`` the rules of thumb."""
