"""What only maintainers of shim need: pins, generated pages, new patches. It lies beside the package, in no wheel.

A source tree imports it as `shim.maintenance`, as it does the patches. Nothing in shim imports it but
shim._tools.checkout, on behalf of commands that need a source tree.
"""
