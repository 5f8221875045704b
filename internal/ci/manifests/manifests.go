// Package manifests has tests alone, of what is in deploy/ for Docker, Compose and
// Kubernetes. It is a module of its own, so that the parsers of those stay out of
// Wayhouse's.
package manifests
