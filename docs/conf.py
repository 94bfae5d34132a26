"""Sphinx's configuration of the documentation site (``make docs``).

The source folder is the repository's root. So pages link to one another, to ``evidence/`` and to files of
``src/`` by the same relative paths in the repository's own view and on the site. ``PAGES`` says which files
become pages. A link to any other file of the repository becomes a download of that file. A link to a folder,
or to a file that is not there, fails the build.
"""

from importlib.metadata import version as installed_version

PAGES = [
    "docs/**.md",
    "docs/**.rst",
    "evidence/README.md",
    "evidence/pages/*.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]

project = "trainfit"
author = "trainfit's authors"
release = version = installed_version("trainfit")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = PAGES
exclude_patterns = ["docs/README.md", ".*", "build"]  # docs/index.rst includes the first
templates_path = ["_site"]
nitpicky = True
# Types of Python, of libraries and of inner modules have no pages here.
nitpick_ignore_regex = [(r"py:.*", r"(?!trainfit\.\w+$).*")]

autodoc_class_signature = "separated"  # Results are made by functions: their constructors are not shown.
autodoc_default_options = {"exclude-members": "__init__, __new__"}
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
copybutton_prompt_text = "$ "  # Of a block with outputs the button copies the commands alone.
copybutton_line_continuation_character = "\\"
copybutton_here_doc_delimiter = "EOF"

# Anchors of headings as GitHub spells them, down to the fourth level.
myst_heading_anchors = 4

html_theme = "furo"
html_title = "trainfit"
html_copy_source = False
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_additional_pages = {"index": "start.html"}  # "/" leads to docs/index.html
