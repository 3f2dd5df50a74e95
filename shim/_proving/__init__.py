"""`shim prove`: each defect on the installed releases, on stock and with the patch, in processes of their own."""
