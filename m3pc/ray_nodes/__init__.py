"""Optional: Ray clusters that m3pc starts itself (`m3pc node`) and supervises without systemd,
KubeRay or `ray up`.

A cluster that was started in any other way works as well, by `--address`. Runs need only
`connection.py` from here.
"""
