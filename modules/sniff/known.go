package sniff

// Known is the host that somebody has found in the flow by now: a sniffer, or
// who has asked for the server name. Nobody is asked. It belongs to the flow.
func (f *Flow) Known() []byte {
	switch {
	case f.verdict == Recognised && f.hint.HasHost:
		return f.hint.Host
	case f.nameKnown == Recognised:
		return f.name
	}
	return nil
}
