"""Who can reach the server: bind, hosts, origins, networks."""
