"""What a user of verl names in VERL_USE_EXTERNAL_MODULES, as a plugin's entry point, or as a model's external_lib."""

import shim

shim.apply()
