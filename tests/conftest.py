"""Makes what several rooms' tests share (`tls_files`) importable from each of them."""
