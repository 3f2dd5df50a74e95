"""Pins of a fake matrix, measured and written as `shim pin` does it."""

from dataclasses import replace

from shim._matrix.load import read_content
from shim.maintenance.pin import measure, write
from shim.maintenance.tables import render_pins


def write_pins(matrix, tree, change=None):
    """Pin the file `matrix` on `tree(distribution, release)`. `change` has other fingerprints, by patch and target.

    Does without load_matrix, because the modules of the patches need not be on sys.path here.
    """
    rules = read_content(matrix, matrix.read_bytes(), check_ranges=True)
    pins = measure(rules, tree)
    for of_release in (found for releases in pins.values() for found in releases.values()):
        for id, pin in of_release.items():
            of_release[id] = replace(pin, fingerprints={**pin.fingerprints, **(change or {}).get(id, {})})
    write(matrix, render_pins(pins))
