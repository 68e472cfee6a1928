"""The site: these pages and notebooks, and the docstrings. `make docs` builds it into `site/`, warnings as errors."""

import gefen_fn

project = "gefen-fn"
author = "the gefen-fn developers"
copyright = author
release = gefen_fn.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence", "dollarmath"]
nb_execution_mode = "off"  # the tests run the notebooks; the site shows what they showed
nitpicky = False

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "  # what is copied can be pasted
copybutton_prompt_is_regexp = True
default_role = "code"  # docstrings write code in single backticks

html_theme = "furo"
html_title = "gefen-fn"
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e4f", "color-brand-content": "#0b6e4f"},
    "dark_css_variables": {"color-brand-primary": "#5fd3a8", "color-brand-content": "#5fd3a8"},
}
