"""Files from elsewhere: for each format, the one place where untrusted bytes become checked values.

Everything that reads JSON, YAML, safetensors or GGUF goes through these modules. Each of them checks sizes, types and
names before it allocates anything, and reports a damaged or hostile file in one sentence. May import `errors` only.
"""
