package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const cniConfig = "/etc/cni/net.d/10-kindnet.conflist"

// kindnet replaces kind's own kindnetd, which is published as an image only. On each node it writes the CNI
// configuration for the node's pod range, maintains routes to the pod ranges of all other nodes, and masquerades
// traffic that leaves the pod network. It does not enforce NetworkPolicy.
func kindnet(ctx context.Context) error {
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	if endpoint := os.Getenv("CONTROL_PLANE_ENDPOINT"); endpoint != "" {
		config.Host = "https://" + endpoint // Services do not work before kindnet runs
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	hostIP, podSubnet := os.Getenv("HOST_IP"), os.Getenv("POD_SUBNET")
	for ; ; time.Sleep(2 * time.Second) {
		nodes, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			fmt.Fprintln(os.Stderr, "list nodes:", err)
			continue
		}
		for _, node := range nodes.Items {
			if ip := internalIP(&node); ip == nil || node.Spec.PodCIDR == "" {
				continue // not known yet; the next round tries again
			} else if ip.String() == hostIP {
				err = writeConfig(node.Spec.PodCIDR)
			} else {
				err = route(node.Spec.PodCIDR, ip)
			}
			if err != nil {
				fmt.Fprintln(os.Stderr, node.Name, err)
			}
		}
		if err := masquerade(podSubnet); err != nil {
			fmt.Fprintln(os.Stderr, "masquerade:", err)
		}
	}
}

func internalIP(node *v1.Node) net.IP {
	for _, address := range node.Status.Addresses {
		if address.Type == v1.NodeInternalIP {
			if ip := net.ParseIP(address.Address).To4(); ip != nil {
				return ip
			}
		}
	}
	return nil
}

func writeConfig(podCIDR string) error {
	config := fmt.Sprintf(`{"cniVersion": "0.3.1", "name": "kindnet", "plugins": [
 {"type": "ptp", "ipMasq": false, "mtu": 1500, "ipam": {"type": "host-local", "dataDir": "/run/cni-ipam-state",
  "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{"subnet": %q}]]}},
 {"type": "portmap", "capabilities": {"portMappings": true}}]}`, podCIDR)
	if old, _ := os.ReadFile(cniConfig); string(old) == config {
		return nil
	}
	if err := os.WriteFile(cniConfig+".tmp", []byte(config), 0o644); err != nil {
		return err
	}
	return os.Rename(cniConfig+".tmp", cniConfig)
}

func route(podCIDR string, gateway net.IP) error {
	_, destination, err := net.ParseCIDR(podCIDR)
	if err != nil {
		return err
	}
	return netlink.RouteReplace(&netlink.Route{Dst: destination, Gw: gateway})
}

func masquerade(podSubnet string) error {
	subnet, _, _ := strings.Cut(podSubnet, ",")
	rule := []string{"POSTROUTING", "-s", subnet, "!", "-d", subnet,
		"-m", "addrtype", "!", "--dst-type", "LOCAL", "-j", "MASQUERADE"}
	if iptables("-C", rule) == nil {
		return nil
	}
	return iptables("-A", rule)
}

func iptables(action string, rule []string) error {
	out, err := exec.Command("iptables", append([]string{"-w", "-t", "nat", action}, rule...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("iptables %s: %w: %s", action, err, out)
	}
	return nil
}
