"""Optional: Ray clusters that m3pc starts itself (`m3pc node`) and supervises without systemd,
KubeRay or `ray up`.

Clusters that were started in another way work as well, with `--address`; runs need only
`connection.py` of this package.
"""
