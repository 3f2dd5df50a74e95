"""`shim prove`: each defect on the installed releases, on stock and with the patch, in separate processes."""
