"""Every commit of upstream's main, development and release branches: its bodies, and what proofs say of them."""
